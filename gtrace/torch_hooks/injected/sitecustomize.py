"""Python runs this at its start in the processes that a captured program launches.

Its folder is on their PYTHONPATH, and is removed from ``sys.path`` at once.
"""


def _start() -> None:
    import importlib
    import json
    import os
    import sys

    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != here]
    ours = sys.modules.pop("sitecustomize")
    try:
        # The user's or distribution's sitecustomize, which this one hides.
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
        message = json.loads(os.environ.get("GTRACE_CAPTURE", "{}"))
        # Another Python, or another environment, has other packages.
        if message.get("python") == [sys.prefix, *sys.version_info[:2]]:
            # Restore instead of remove: the entry may already be there, further up.
            before = sys.path[:]
            sys.path.append(message["gtrace"])
            try:
                children = importlib.import_module("gtrace.torch_hooks.children")
            finally:
                sys.path[:] = before
            children.watch(message)


_start()
