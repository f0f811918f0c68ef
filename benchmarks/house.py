"""How large the house is: files, lines and the habits that make code hard to hold in a head.

    python benchmarks/house.py [--json] [FOLDER]

Counts the Python files of ``gtrace/`` (of FOLDER, if given: the root of another checkout to compare with), and what
their lines are, package by package. Every import counts as one, also under TYPE_CHECKING and inside functions. Needs
ruff for the complexity of functions.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).resolve().parents[1]
#: parameters of a function outside kernels, at most
PARAMETERS = 8
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_name(path, root):
    """The dotted name of a file."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def body_of(function):
    """Statements of a function without its docstring."""
    body = function.body
    first = body[0] if body else None
    documented = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return body[1:] if documented and isinstance(first.value.value, str) else body


def imports_of(node, modules):
    """Modules of the package that an import statement names."""
    if isinstance(node, ast.Import):
        return {alias.name for alias in node.names if alias.name in modules}
    if not isinstance(node, ast.ImportFrom) or node.level or not node.module:
        return set()
    inner = {f"{node.module}.{alias.name}" for alias in node.names} & modules
    outer = {node.module} & modules
    # ``from package import module`` imports the module; the package itself only if it gives a name of its own.
    return inner | (outer if len(inner) < len(node.names) else set())


def calls_of(tree):
    """Method names that a module calls, with the number of arguments of each call."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found.add((node.func.attr, len(node.args)))
    return found


def is_loop(tree):
    """Whether a module drives codecs through steps: it calls fit, an encoder, and update(state, values, decoded)."""
    calls = calls_of(tree)
    names = {name for name, _ in calls}
    return {"fit"} <= names and bool(names & {"encode", "simulate"}) and ("update", 3) in calls


def cycles(edges):
    """(cycles, modules in them) of a graph module -> modules."""
    names = sorted(edges.keys() | {name for found in edges.values() for name in found})
    if not names:
        return 0, 0
    place = {name: k for k, name in enumerate(names)}
    pairs = [(place[one], place[other]) for one, found in edges.items() for other in found]
    rows, columns = np.array(pairs or [(0, 0)]).T
    graph = coo_array((np.ones(rows.size), (rows, columns)), shape=(len(names), len(names)))
    _, label = connected_components(graph, connection="strong")
    sizes = np.bincount(label)
    return int((sizes > 1).sum()), int(sizes[sizes > 1].sum())


def worst_complexity(package):
    """The largest cyclomatic complexity that ruff finds."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "C901", "--output-format", "concise"]
    command += ["--config", "lint.mccabe.max-complexity=1", str(package)]
    found = re.findall(r"\((\d+) > 1\)", subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return max(map(int, found), default=0)


def packages(root):
    """Package -> files, lines, and of these lines of docstrings, of imports and blank ones; single files are ``.``."""
    found = defaultdict(lambda: np.zeros(5, np.int64))
    for path in (root / "gtrace").rglob("*.py"):
        text = path.read_text(encoding="utf8")
        documented, imported = set(), set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                imported.update(range(node.lineno, node.end_lineno + 1))
            elif isinstance(node, (ast.Module, ast.ClassDef, *_FUNCTIONS)) and len(body_of(node)) < len(node.body):
                documented.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        lines = text.splitlines()
        blank = {k for k, line in enumerate(lines, 1) if not line.strip()} - documented
        place = path.relative_to(root / "gtrace").parts
        found[place[0] if len(place) > 1 else "."] += [1, len(lines), len(documented), len(imported), len(blank)]
    return dict(sorted(found.items()))


def measure(root):
    """All figures of the checkout at ``root``."""
    package = root / "gtrace"
    paths = sorted(package.rglob("*.py"))
    trees = {module_name(path, root): ast.parse(path.read_text(encoding="utf8")) for path in paths}
    lines = {module_name(path, root): path.read_text(encoding="utf8").count("\n") for path in paths}
    packages = {module_name(path, root) for path in paths if path.name == "__init__.py"}
    modules = set(trees)
    importers = defaultdict(set)
    inside, everywhere = defaultdict(set), defaultdict(set)
    classes: Counter[str] = Counter()
    functions = single = wide = nested = overrides = 0
    widest = 0
    for name, tree in trees.items():
        classes.update(node.name for node in tree.body if isinstance(node, ast.ClassDef))
        home = name if name in packages else name.rpartition(".")[0]
        for node in ast.walk(tree):
            for other in imports_of(node, modules) - {name}:
                importers[other].add(name)
                everywhere[name].add(other)
                if other.startswith(home + ".") and home != "gtrace":
                    inside[name].add(other)
            if not isinstance(node, _FUNCTIONS):
                continue
            functions += 1
            single += len(body_of(node)) == 1
            nested += sum(isinstance(inner, (ast.Import, ast.ImportFrom)) for inner in ast.walk(node))
            if not re.search(r"gtrace\.kernels|_kernels$", name):
                arguments = node.args
                count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
                count -= bool(arguments.args) and arguments.args[0].arg in ("self", "cls")
                wide += count > PARAMETERS
                widest = max(widest, count)
            overrides += name.startswith("gtrace.codecs.") and node.name in ("encode", "decode")
    lonely = [name for name in modules - packages if len(importers[name]) == 1]
    small = [name for name in lonely if lines[name] < 100 and not name.startswith(("gtrace.codecs", "gtrace.cli"))]
    return {
        "files": len(paths),
        "lines": sum(lines.values()),
        "functions": functions,
        "functions of one statement": single,
        "modules with one importer": len(lonely),
        "of these below 100 lines, codecs and commands aside": len(small),
        "functions above 8 parameters outside kernels": wide,
        "most parameters outside kernels": widest,
        "worst complexity (C901)": worst_complexity(package),
        "imports inside functions": nested,
        "cycles inside packages": cycles(inside)[0],
        "modules in these cycles": cycles(inside)[1],
        "class names used twice": sum(count > 1 for count in classes.values()),
        "definitions of encode and decode in codecs": overrides,
        "modules that loop over fit, encode and update": sum(map(is_loop, trees.values())),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT, metavar="FOLDER")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    found = measure(args.folder.resolve())
    if args.json:
        print(json.dumps(found, indent=1))
        return
    print("| figure | count |\n|---|--:|")
    for name, value in found.items():
        print(f"| {name} | {value:,} |")
    print("\n| package | files | lines | docstrings | imports | blank | the rest |\n|---|--:|--:|--:|--:|--:|--:|")
    for name, counts in packages(args.folder.resolve()).items():
        print(f"| {name} |", *(f"{value:,} |" for value in (*counts, counts[1] - counts[2:].sum())))


if __name__ == "__main__":
    main()
