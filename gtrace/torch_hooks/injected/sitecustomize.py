"""Python runs this at its start in the processes that a captured program launches.

Its folder is on their PYTHONPATH, and leaves ``sys.path`` again at once.
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
        # The one that this one hides, of the user or of the distribution.
        importlib.import_module("sitecustomize")
    except ImportError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", ours)
        told = json.loads(os.environ.get("GTRACE_CAPTURE", "{}"))
        # Another Python, or another environment, has other packages.
        if told.get("python") == [sys.prefix, *sys.version_info[:2]]:
            # Put back and not removed: it may be there already, and further up.
            before = sys.path[:]
            sys.path.append(told["gtrace"])
            try:
                children = importlib.import_module("gtrace.torch_hooks.children")
            finally:
                sys.path[:] = before
            children.watch(told)


_start()
