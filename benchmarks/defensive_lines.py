"""Counts lines of code that only refuse input: what raises TraceError or PayloadError, and the tests that lead there.

    python benchmarks/defensive_lines.py [FOLDER]

A line counts if it belongs to a ``raise`` of such an error or to a call of a function that does nothing else, to an
``if`` or ``except`` whose whole body is that, or to a ``try`` that has only such handlers (its body does not count).
"""

import argparse
import ast
from pathlib import Path

ERRORS = ("TraceError", "PayloadError", "_fault", "_missing")
#: functions that only raise one of them
REFUSING = ("_reject", "_refuse", "_lost", "refuse", "tolerate", "_damaged")
ROOT = Path(__file__).parents[1]
READERS = ("gtrace/trace/**/*.py", "gtrace/coding/*.py", "gtrace/codecs/*.py", "gtrace/torch_hooks/statedicts.py")


def name_of(node):
    """The last name of what is called."""
    return getattr(node, "attr", getattr(node, "id", ""))


def refuses(statement):
    """Whether a statement does nothing but refuse."""
    if isinstance(statement, ast.Raise):
        made = statement.exc.func if isinstance(statement.exc, ast.Call) else statement.exc
        return name_of(made) in ERRORS
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and name_of(call.func) in REFUSING


def lines_of(node):
    """Numbers of a node's lines."""
    return set(range(node.lineno, node.end_lineno + 1))


def defensive(tree):
    """Numbers of the lines that only refuse."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and refuses(node):
            found |= lines_of(node)
        elif isinstance(node, (ast.If, ast.ExceptHandler)) and any(map(refuses, node.body)):
            # The test counts, what else is in the body prepares the message.
            last = node.body[-1].end_lineno if refuses(node.body[-1]) else node.body[0].lineno - 1
            found |= set(range(node.lineno, last + 1))
        elif isinstance(node, ast.Try) and all(any(map(refuses, handler.body)) for handler in node.handlers):
            found |= {node.lineno} if node.handlers else set()
    return found


def main():
    """Print the lines of each package, and their sum."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, help="the repository")
    folder = parser.parse_args().folder
    total = 0
    for pattern in READERS:
        counts = {path: len(defensive(ast.parse(path.read_text()))) for path in sorted(folder.glob(pattern))}
        total += sum(counts.values())
        for path, count in counts.items():
            if count:
                print(f"{count:5}  {path.relative_to(folder)}")
    print(f"{total:5}  lines that only refuse input")


if __name__ == "__main__":
    main()
