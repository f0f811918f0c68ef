"""The pages of README and docs: their code blocks, what they say about them, and the files that they start from."""

from __future__ import annotations

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
    """One code block.

    Attributes:
        line: where it begins.
        language: what stands behind the fence; empty without one.
        text: what is inside.
        notes: what comments directly before it say, as in ``not run: it takes four minutes``.
    """

    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def is_shell(self) -> bool:
        """Whether lines of it are typed into a shell."""
        return self.language in _SHELL or (not self.language and any(map(_is_command, self.text.splitlines())))

    @property
    def reason(self) -> str | None:
        """Why it is not run here; None where it is."""
        return next((note for note in self.notes if note.startswith(("not run: ", "run by: "))), None)

    def note(self, name: str) -> str | None:
        """What a comment ``NAME: ...`` before it says."""
        return next((note.removeprefix(f"{name}: ") for note in self.notes if note.startswith(f"{name}: ")), None)

    @property
    def commands(self) -> list[tuple[list[str], list[str]]]:
        """Words of each command, and the lines that are shown below it."""
        found: list[tuple[list[str], list[str]]] = []
        for line in self.text.replace("\\\n", " ").splitlines():
            if line.startswith("$ ") or (self.language != "console" and _is_command(line)):
                found.append((shlex.split(line.removeprefix("$ "), comments=True), []))
            elif self.language == "console" and found:
                found[-1][1].append(line)
        return [(words, shown) for words, shown in found if words]


def _is_command(line: str) -> bool:
    line = _ASSIGNED.sub("", line.removeprefix("$ "))
    return line.split(" ")[0] in ("gtrace", *OTHERS)


def blocks(page: str) -> list[Block]:
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


def run_command(words: list[str]) -> str:
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


def gtrace_words(words: list[str]) -> list[str] | None:
    """The words behind ``gtrace`` in a command line, also behind a launcher; None where there is none."""
    return words[words.index("gtrace") + 1 :] if "gtrace" in words else None


def differs(shown: list[str], printed: list[str], *, numbers: bool) -> str | None:
    """The first part of the shown lines that was not printed; ``...`` stands for any lines, or for the rest of one.

    Without ``numbers``, digits, sparklines and the spaces of columns count as equal.
    """
    there = [_plain(line, numbers) for line in printed]
    at, parts = 0, [list(part) for part in _split(shown)]
    for k, part in enumerate(parts):
        wanted = [_plain(line, numbers) for line in part]
        places = [i for i in range(at, len(there) - len(wanted) + 1) if all(map(_same, wanted, there[i:]))]
        places = [i for i in places if (k > 0 or i == 0) and (k < len(parts) - 1 or i + len(wanted) == len(there))]
        if not places:
            return "\n".join(part)
        at = places[0] + len(wanted)
    return None


def _same(wanted: str, line: str) -> bool:
    return line.startswith(wanted.removesuffix(" ...")) if wanted.endswith(" ...") else line == wanted


def _split(lines: list[str]) -> list[list[str]]:
    parts: list[list[str]] = [[]]
    for line in lines:
        if line.strip() == "...":
            parts.append([])
        else:
            parts[-1].append(line)
    return parts


def _plain(line: str, numbers: bool) -> str:
    if numbers:
        return line.rstrip()
    return " ".join(re.sub(r"[-+]?\d[\d,.]*(e-?\d+)?|[▁▂▃▄▅▆▇█]+|★|–", "N", line).split())


def make_trace(path: Path) -> None:
    """A small trace with the names of the sample's: eight steps in two bursts."""
    import gtrace

    rng = np.random.default_rng(0)
    shapes = {"conv1.weight": (8, 1, 3, 3), "conv1.bias": (8,), "fc1.weight": (64, 40), "head.weight": (10, 64)}
    with gtrace.create_trace(path) as writer:
        for step in (0, 1, 2, 3, 100, 101, 102, 103):
            for name, shape in shapes.items():
                writer.append(step, name, rng.standard_t(4, shape).astype(np.float32))
            writer.commit(step, loss=1 / (step + 1), lr=0.1)


def make_sweep(path: Path) -> None:
    """A small sweep of that trace."""
    import gtrace

    trace = path.with_name("of-a-sweep.zarr")
    if not trace.exists():
        make_trace(trace)
    gtrace.run_sweep(trace, ["qsgdinf:bits=3", "qsgdinf:bits=4", "alq:bits=3", "zipml:bits=3"], output=path)


def make_run_log(path: Path) -> None:
    """The run log of a short training."""
    import gtrace

    gtrace.training.train("digits-mlp", ["qsgdinf:bits=3"], steps=3, log=path)


def provide(folder: Path, names: str) -> None:
    """Put files into a page's folder, as ``<!-- with: run.zarr, train.jsonl -->`` asks for."""
    for name in names.split(", "):
        path = folder / name
        if path.exists():
            continue
        {".zarr": make_trace, ".h5": make_trace, ".db": make_sweep, ".jsonl": make_run_log}[path.suffix](path)
