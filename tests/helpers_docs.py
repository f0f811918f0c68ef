"""The pages of README and docs: their code blocks, what they say about them, and the files that they start from."""

import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from helpers_capture import run_gtrace
from markdown_it import MarkdownIt

import gtrace
from gtrace.cli import main

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md"))
    if "_build" not in path.parts
)
#: programs whose lines are commands, besides gtrace
OTHERS = ("pip", "python", "make", "torchrun", "dask", "git", "aws", "source", "sphinx-build")
_SHELL = ("console", "bash", "sh")
_ASSIGNED = re.compile(r"^[A-Z_]+=\S+ ")


class Block(NamedTuple):
    """One code block: where it begins, what is behind the fence, its text, and what comments directly before it say."""

    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def is_shell(self):
        """Whether lines of it are typed into a shell."""
        return self.language in _SHELL or (not self.language and any(map(_is_command, self.text.splitlines())))

    @property
    def reason(self):
        """Why it is not run here; None if it is."""
        return next((note for note in self.notes if note.startswith(("not run: ", "run by: "))), None)

    def note(self, name):
        """What a comment ``NAME: ...`` before it says."""
        return next((note.removeprefix(f"{name}: ") for note in self.notes if note.startswith(f"{name}: ")), None)

    @property
    def commands(self):
        """Words of each command, and the lines that are shown below it."""
        found = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ ") or (self.language != "console" and _is_command(line)):
                found.append((shlex.split(line.removeprefix("$ "), comments=True), []))
            elif self.language == "console" and found:
                found[-1][1].append(line)
        return [(words, shown) for words, shown in found if words]


def _is_command(line):
    return _ASSIGNED.sub("", line.removeprefix("$ ")).split(" ")[0] in ("gtrace", *OTHERS)


def blocks(page):
    """All code blocks of a page, fenced or indented."""
    found, notes = [], []
    for token in MarkdownIt("commonmark").parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type == "html_block":
            notes += re.findall(r"<!-- (.*?) -->", token.content, re.DOTALL)
            continue
        if token.type in ("fence", "code_block") and not token.info.startswith("{"):
            found.append(Block(token.map[0] + 1, token.info.strip(), token.content, tuple(notes)))
        notes = []
    return found


def run_command(words):
    """What a command of gtrace prints; what patches torch or registers codecs gets a process of its own."""
    if words[0] == "capture" or any(word.endswith(".py") for word in words):
        done = run_gtrace(*words, cwd=Path.cwd(), together=True)
        code, printed = done.returncode, done.stdout
    else:
        both = io.StringIO()
        with redirect_stdout(both), redirect_stderr(both), pytest.raises(SystemExit) as ended:
            main(words)
        code, printed = ended.value.code, both.getvalue()
    assert code == 0, f"gtrace {' '.join(words)}\n{printed}"
    return printed


def differs(shown, printed, *, numbers):
    """The first part of the shown lines that was not printed; ``...`` is any lines, or the rest of one.

    Without ``numbers``, digits, sparklines and the spaces of columns count as equal.
    """

    def plain(line):
        if numbers:
            return line.rstrip()
        return " ".join(re.sub(r"[-+]?\d[\d,.]*(e-?\d+)?|[▁▂▃▄▅▆▇█]+|★|–", "N", line).split())

    def same(wanted, line):
        return line.startswith(wanted.removesuffix(" ...")) if wanted.endswith(" ...") else line == wanted

    there, at, parts = [plain(line) for line in printed], 0, [[]]
    for line in shown:
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    for k, part in enumerate(parts):
        wanted = [plain(line) for line in part]
        places = [i for i in range(at, len(there) - len(wanted) + 1) if all(map(same, wanted, there[i:]))]
        places = [i for i in places if (k > 0 or i == 0) and (k < len(parts) - 1 or i + len(wanted) == len(there))]
        if not places:
            return "\n".join(part)
        at = places[0] + len(wanted)
    return None


def make_trace(path):
    """A small trace with the names of the sample's: eight steps in two bursts."""
    rng = np.random.default_rng(0)
    shapes = {"conv1.weight": (8, 1, 3, 3), "conv1.bias": (8,), "fc1.weight": (64, 40), "head.weight": (10, 64)}
    with gtrace.create_trace(path) as writer:
        for step in (0, 1, 2, 3, 100, 101, 102, 103):
            for name, shape in shapes.items():
                writer.append(step, name, rng.standard_t(4, shape).astype(np.float32))
            writer.commit(step, loss=1 / (step + 1), lr=0.1)


def make_sweep(path):
    """A small sweep of that trace."""
    trace = path.with_name("of-a-sweep.zarr")
    if not trace.exists():
        make_trace(trace)
    gtrace.run_sweep(trace, ["qsgdinf:bits=3", "qsgdinf:bits=4", "alq:bits=3", "zipml:bits=3"], output=path)


def make_run_log(path):
    """The run log of a short training."""
    gtrace.training.train("digits-mlp", ["qsgdinf:bits=3"], steps=3, log=path)


MAKERS = {".zarr": make_trace, ".h5": make_trace, ".db": make_sweep, ".jsonl": make_run_log}


def provide(folder, names):
    """Put files into a page's folder, as ``<!-- with: run.zarr, train.jsonl -->`` asks for."""
    for path in (folder / name for name in names.split(", ")):
        if not path.exists():
            MAKERS[path.suffix](path)
