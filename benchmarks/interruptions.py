"""Interrupts gtrace's commands in every way, at moments drawn at random, and checks what is left.

    python benchmarks/interruptions.py [--runs 500] [--minutes M] [--beside 1] [--seed 0] [--ways "kill -9"]
        [-o FILE.json]

Half of the runs are captures: one process or four that train a small network, every step recorded, and write down a
digest of each gradient themselves. After the first commit something happens: kill -9 of some processes (in every third
run at any moment, also before a trace is there), SIGTERM to all, Ctrl-C once or twice while the last steps are being
written, SIGSTOP of one process, a full disk, or the trace is deleted. Where processes are left, they then come to their
own end. A run is right if

- every step in the trace has the values that the program wrote down, and the trace names those that are missing
  (after kill -9 the last ones are missing); after kill -9, `repair` makes a trace without faults of the same steps;
- status, exit code and the last words are those that the documentation promises;
- every process that can end does so within two seconds of the last signal, or of its own end, and none is left. After
  one Ctrl-C it may take as long as writing takes. Seconds in which a process was ready and others had the cores do not
  count.

The other half are sweep, report, plan, train and import. Each is killed at random moments and started again, up to
23 times, and then left alone; or its disk becomes full, or its trace is deleted. Such a run is right if each output
is absent or whole after each kill, and if in the end the folder holds what an undisturbed run leaves: the same files,
rows, losses.

Processes are forked from one that has imported torch and opened no trace; every fiftieth run (``--fresh``) starts an
interpreter for each. With ``--beside 4`` four runs take place at a time. Ctrl-C ends after the runs that have begun.
Adds its counts to those of other seeds in FILE.json, and prints the table of all.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import gc
import hashlib
import json
import math
import os
import random
import re
import resource
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gtrace.errors import GtraceError, TraceError

if TYPE_CHECKING:
    from collections.abc import Iterator

WAYS = ("kill -9", "SIGTERM", "Ctrl-C", "SIGSTOP", "full disk", "deleted")
#: seconds in which a process ends, and after which one that does not has hung
PROMISED, HUNG = 2.0, 60.0
#: seconds between two looks
_LOOK = 0.01
#: bytes of the disk that becomes full
DISK = 4_000_000
#: a command is killed up to this many times, less one, before it is left alone
KILLS = 24

PROGRAM = """
import hashlib, os, sys, time
import torch

steps, folder, rank = int(sys.argv[1]), sys.argv[2], int(os.environ.get("RANK", 0))
torch.set_num_threads(1)
torch.manual_seed(rank)
model = torch.nn.Sequential(torch.nn.Linear(256, 140), torch.nn.ReLU(), torch.nn.Linear(140, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
log = os.open(f"{folder}/log{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
while steps and not os.path.exists(f"{folder}/stop"):
    optimizer.zero_grad()
    model(torch.randn(16, 256)).square().mean().backward()
    os.write(log, hashlib.blake2b(b"".join(p.grad.numpy().tobytes() for p in model.parameters())).digest())
    optimizer.step()
    time.sleep(PAUSE)
    steps -= 1
os.close(os.open(f"{folder}/over{rank}", os.O_WRONLY | os.O_CREAT))
"""
INPUTS = ("run.zarr", "run.sweep.db", "grads")
SUFFIXES = (".zarr", ".h5")
#: output of a command -> the command
COMMANDS = {
    "out.db": "sweep run.zarr --methods qsgdinf:bits=3,alq:bits=2 --jobs 1 -o out.db",
    "page.html": "report run.sweep.db -o page.html --force",
    "plan.toml": "plan run.zarr --max-bits 3 --methods qsgdinf --bits 2-3 -o plan.toml --force",
    "log.jsonl": "train --task digits-mlp --codec qsgdinf:bits=3 --steps 12 --workers 1 -o log.jsonl",
    "new.zarr": "trace import grads -o new.zarr",
    "new.h5": "trace import grads -o new.h5",
}
#: what it says to Ctrl-C while it finishes a trace
_ANSWERED = re.compile("gtrace: (writing the last|closing) ")
_DIGEST = hashlib.blake2b().digest_size


class Process:
    """A process of ``gtrace`` in a group of its own."""

    def __init__(self, pid: int, said: Path) -> None:
        self.pid, self._said = pid, said
        #: exit code, negative after a signal; None while it runs
        self.code: int | None = None

    @property
    def said(self) -> str:
        """What it printed; nothing if it was ended before it could."""
        return self._said.read_text() if self._said.exists() else ""

    def send(self, number: int) -> None:
        """Send a signal if it still runs."""
        if self.code is None:
            os.kill(self.pid, number)

    def ended(self) -> bool:
        """Whether it is over."""
        if self.code is None:
            # Until the process between them has ended, it is nobody's child.
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.code = os.waitstatus_to_exitcode(status)
        return self.code is not None

    def delays(self) -> dict[str, int]:
        """Nanoseconds that each of its threads has waited for a core so far."""
        found = {}
        for place in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):
                found[place.parent.name] = int(place.read_text().split()[1])
        return found

    def left(self) -> bool:
        """Whether anything of its group still runs after a moment."""
        end = time.monotonic() + 10 * PROMISED
        with contextlib.suppress(ProcessLookupError):
            while time.monotonic() < end:
                # What its end left to this process, which stands in for that of an orphan.
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(-self.pid, os.WNOHANG)
                os.killpg(self.pid, 0)
                time.sleep(_LOOK)
            os.killpg(self.pid, signal.SIGKILL)
            return True
        return False


class Starter:
    """Starts processes: forked ones, which become children of this process, or new interpreters."""

    def __init__(self, undisturbed: Path) -> None:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, "--serve", str(theirs.fileno()), str(os.getpid()), str(undisturbed)]
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._ours.recv(1)
        self._asking = threading.Lock()

    def start(self, folder: Path, name: str, arguments: list[str], rank: int | None = None, **more: Any) -> Process:
        """Start one in ``folder``; its words go to ``NAME.txt`` there."""
        place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        said = folder / f"{name}.txt"
        about = {"folder": str(folder), "said": str(said), "env": place, "args": arguments}
        request = about | {"limit": None, "short": True} | more
        if request.pop("fresh", False):
            with open(said, "w") as words:
                process = subprocess.Popen(
                    [sys.executable, "-m", "gtrace", *arguments],
                    cwd=folder,
                    env=os.environ | place,
                    stdin=subprocess.DEVNULL,
                    stdout=words,
                    stderr=words,
                    process_group=0,
                )
            process.returncode = 0  # it is waited for here, not by subprocess
            return Process(process.pid, said)
        with self._asking:
            self._ours.send(json.dumps(request).encode())
            return Process(int(self._ours.recv(64)), said)

    def time(self, folder: Path, output: str) -> float:
        """Seconds of an undisturbed command in ``folder``, which then has its output."""
        place = folder / output
        (shutil.rmtree if place.is_dir() else Path.unlink)(place) if place.exists() else None
        began = time.monotonic()
        process = self.start(folder, "../said", COMMANDS[output].split())
        while not process.ended():
            time.sleep(_LOOK / 4)
        if process.code != 0:
            raise RuntimeError(f"{output}: {process.said}")
        return time.monotonic() - began

    def close(self) -> None:
        """End the server."""
        self._ours.close()
        self._server.wait()


def serve(descriptor: int, parent: int, undisturbed: str) -> dict[str, Any] | None:
    """Run what needs no torch in a folder, then fork a process for each request, with this parent.

    Returns:
        In such a process its request, in this one None at the end.
    """
    import torch

    import gtrace.capture.recorder
    import gtrace.capture.session
    import gtrace.trace.hdf5
    import gtrace.trace.shared
    import gtrace.training  # noqa: F401 - what all of them import
    from gtrace.cli import main as run

    os.chdir(undisturbed)
    make_inputs()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        for line in COMMANDS.values():
            with contextlib.suppress(SystemExit):
                if not line.startswith("train"):
                    run(line.split())
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports more of torch than all else
    gc.freeze()  # pages that are not touched are not copied
    in_large_pages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends when the runs do
    requests = socket.socket(fileno=descriptor)
    requests.send(b".")
    while message := requests.recv(1 << 16):
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                requests.send(str(pid).encode())
                os._exit(0)
            requests.close()
            # A launch is known by the parent of its processes.
            while os.getppid() != parent:
                time.sleep(0.001)
            become(request := json.loads(message))
            return request
        os.waitpid(between, 0)
    return None


def in_large_pages() -> None:
    """Have the kernel join what this process has allocated into pages of 2 MB, so that a fork copies fewer entries."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *_ = line.split()
        if inode == "0" and access == "rw-p":
            first, last = (int(end, 16) for end in place.split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), 25)  # MADV_COLLAPSE


def become(request: dict[str, Any]) -> None:
    """Set this process up for a request."""
    os.setpgid(0, 0)
    # A shell that starts this program in the background has it ignore Ctrl-C, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, place in ((0, os.devnull), (1, request["said"]), (2, request["said"])):
        opened = os.open(place, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(opened, number)
        os.close(opened)
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], -1))
    os.environ.update(request["env"])
    os.chdir(request["folder"])
    sys.argv, sys.path[0] = ["gtrace", *request["args"]], request["folder"]


def make_inputs() -> None:
    """A small trace, its sweep, and arrays to import, in this folder."""
    import gtrace

    os.mkdir("grads")
    with gtrace.create_trace("run.zarr") as writer:
        for step in range(6):
            values = np.random.default_rng(step).standard_normal(500).astype(np.float32)
            np.savez(f"grads/step_{step}.npz", w=values, b=values[:50])
            writer.append(step, "w", values)
            writer.append(step, "b", values[:50])
            writer.commit(step, loss=1 / (1 + step))
    gtrace.run_sweep("run.zarr", ["qsgdinf:bits=3", "nuqsgd:bits=3"], output="run.sweep.db", jobs=1)


def end_of(request: dict[str, Any]) -> None:
    """Run the command; a short end leaves out that modules are taken apart, which costs most of a small command."""
    code: Any = 0
    try:
        runpy.run_module("gtrace", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code or 0
        if not request["short"]:
            raise
    if request["short"]:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(code)


class Result(NamedTuple):
    """One run.

    Attributes:
        seconds: that its processes took to end.
        kills: processes that were killed.
        late: how many of them after they had written something; captures after a step was committed.
        kept: steps in the trace.
        taken: steps that were taken.
        wrong: what is wrong, if anything.
    """

    seconds: float
    kills: int = 0
    late: int = 0
    kept: int = 0
    taken: int = 0
    wrong: str = ""


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A disk of ``size`` bytes at ``place``; False if this account can't mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(place)], check=True)


class Run:
    """One interrupted capture.

    Args:
        starter: starts its processes.
        folder: an empty folder.
        way: one of ``WAYS``.
        suffix: of the trace.
        processes: 1 or 4.
        rng: decides when.
        fresh: start interpreters instead of forking.
    """

    def __init__(
        self, starter: Starter, folder: Path, way: str, suffix: str, processes: int, rng: random.Random, *, fresh: bool
    ) -> None:
        self.way, self.folder, self._rng, self._fresh = way, folder, rng, fresh
        self._starter = starter
        self.disk = folder / "disk"
        self.disk.mkdir()
        self.trace = self.disk / f"run{suffix}"
        (folder / "train.py").write_text(PROGRAM.replace("PAUSE", "0" if way == "Ctrl-C" else "0.003"))
        #: an HDF5 trace has one writer
        self.ranks = range(processes if suffix == ".zarr" else 1)
        self._options = [] if suffix == ".zarr" or processes == 1 else ["--rank", "0"]
        self._several = processes > 1
        self.processes: list[Process] = []
        self.faults: list[str] = []
        self.presses = 0
        self.kills = self.late = 0
        #: also before there is a trace
        self._early = way == "kill -9" and rng.random() < 1 / 3

    def done(self) -> Result:
        """Start it, interrupt it, and look at what is left."""
        if self.way != "full disk":
            return self._done(None)
        with small_disk(self.disk, DISK) as mounted:
            return self._done(None if mounted else 150_000)

    def _done(self, limit: int | None) -> Result:
        try:
            steps = {"Ctrl-C": self._rng.randrange(20, 300), "full disk": 60}.get(self.way, -1)
            count = 4 if self._several else 1
            how = {"fresh": self._fresh, "limit": limit, "short": self.way == "kill -9"}
            for rank in range(count):
                arguments = ["capture", *self._options, "-o", str(self.trace), "train.py", str(steps), str(self.folder)]
                more = how | ({"rank": rank} if self._several else {})
                self.processes.append(self._starter.start(self.folder, f"said{rank}", arguments, **more))
            if not self._early:
                self._wait(self._begun, "no step is committed", 10 * HUNG)
            seconds = self._interrupt()
            for process in self.processes:
                if process.left():
                    self.faults.append("a process is left")
            kept, taken = self._compare()
            if self._early and self.kills == len(self.processes):
                self._again()
        finally:
            for process in self.processes:
                if not process.ended():
                    os.killpg(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
        return Result(round(seconds, 3), self.kills, self.late, kept, taken, "; ".join(self.faults))

    def _again(self) -> None:
        """Another capture replaces what is left."""
        arguments = ["capture", "--force", "-o", str(self.trace), "train.py", "3", str(self.disk)]
        process = self._starter.start(self.folder, "again", arguments)
        self._wait(process.ended, "the next capture hangs")
        if process.code != 0:
            self.faults.append(f"the next capture: {process.said[-300:]}")

    def _begun(self) -> bool:
        """Whether a step is committed, in the journal or in chunks; of every rank if the trace is to be deleted."""
        begun = 0
        for journal in self.trace.glob("rank*/weight_grad/step/journal"):
            with contextlib.suppress(OSError):
                begun += journal.stat().st_size > 1024 or journal.with_name("c.0").exists()
        # A rank that comes later would start it again.
        return begun >= (len(self.ranks) if self.way == "deleted" else 1)

    def _wait(self, condition: Any, fault: str, limit: float = HUNG) -> float:
        started = time.monotonic()
        while not condition():
            if time.monotonic() - started > limit:
                self.faults.append(fault)
                break
            time.sleep(_LOOK)
        return time.monotonic() - started

    def _end(self, running: list[Process]) -> float:
        """Wait until these have ended; seconds, less those for which they waited for a core."""
        first = [process.delays() for process in running]
        last = [dict(delays) for delays in first]

        def all_ended() -> bool:
            for process, delays in zip(running, last, strict=True):
                delays |= process.delays()
            return all(process.ended() for process in running)

        seconds = self._wait(all_ended, "hangs")
        starved = (sum(b.values()) - sum(a.values()) for a, b in zip(first, last, strict=True))
        return max(0.0, seconds - max(starved, default=0) / 1e9)

    def _over(self, processes: list[Process]) -> None:
        """Wait until the program itself has come to its end in all of these."""
        for process in processes:
            place = self.folder / f"over{self.processes.index(process)}"
            self._wait(lambda place=place, process=process: place.exists() or process.ended(), "the program hangs")

    def _interrupt(self) -> float:
        """Do it; seconds until everything had ended that can."""
        running = list(self.processes)
        victims = self._rng.sample([self.processes[rank] for rank in self.ranks], self._rng.randint(1, len(self.ranks)))
        if self.way in ("Ctrl-C", "full disk"):
            self._over(running)
        else:
            time.sleep(self._rng.uniform(0, 1 if self._early else 0.4))
            self._hit(victims, running)
        if self.way == "Ctrl-C":
            self._press(running)
        elif self.way not in ("SIGTERM", "full disk"):
            (self.folder / "stop").touch()
            self._over(running)
        seconds = self._end(running)
        if self.way == "SIGSTOP":
            victims[0].send(signal.SIGCONT)
            self._wait(victims[0].ended, "hangs after SIGCONT")
        if seconds > PROMISED and self.presses != 1:
            self.faults.append(f"takes {seconds:.1f} s to end")
        return seconds

    def _hit(self, victims: list[Process], running: list[Process]) -> None:
        """What happens to some processes while they train; takes those away from ``running`` that are stopped."""
        if self.way == "kill -9":
            for victim in victims:
                begun = self._begun()
                victim.send(signal.SIGKILL)
                self._wait(victim.ended, "survives kill -9")
                killed = victim.code == -signal.SIGKILL
                self.kills, self.late = self.kills + killed, self.late + (killed and begun)
                time.sleep(self._rng.uniform(0, 0.05))
        elif self.way == "SIGTERM":
            for process in running:
                process.send(signal.SIGTERM)
        elif self.way == "SIGSTOP":
            victims[0].send(signal.SIGSTOP)
            running.remove(victims[0])
            other = ["capture", "-o", str(self.disk / "other.zarr"), "train.py", "5", str(self.disk)]
            bystander = self._starter.start(self.folder, "other", other)
            if self._end([bystander]) > 2 * PROMISED or bystander.code != 0:
                self.faults.append(f"a capture beside it: {bystander.said[-300:]}")
        else:
            # What is being written may come into it once more.
            while self.trace.exists():
                shutil.rmtree(self.trace, ignore_errors=True)
            time.sleep(0.05)

    def _press(self, running: list[Process]) -> None:
        """Ctrl-C, once or twice."""
        self.presses = self._rng.choice((1, 2))
        for _ in range(self.presses):
            time.sleep(self._rng.choice((0.0, self._rng.uniform(0, 0.2))))
            for process in running:
                if not process.ended():
                    process.send(signal.SIGINT)

    def _compare(self) -> tuple[int, int]:
        """Look at codes, words and the trace; steps in the trace, and steps that were taken."""
        from gtrace.trace import open_trace
        from gtrace.trace.check import check_trace, repair_trace
        from gtrace.trace.shared import parts

        for process in self.processes:
            if process.code not in self._codes() and not (self.way == "kill -9" and process.code == -signal.SIGKILL):
                self.faults.append(f"exit code {process.code}: {process.said[-300:]}")
        for rank in self.ranks:
            # Once the trace is closed, Ctrl-C is Python's again.
            failure = self.processes[rank].said.partition("Traceback")[2]
            if "/gtrace/" in failure:
                self.faults.append(failure[-500:])
        if self.way == "deleted":
            if self.trace.exists():
                self.faults.append("the deleted trace is there again")
            if not any("is gone" in process.said for process in self.processes):
                self.faults.append("nobody says that the trace is gone")
            return 0, 0
        kept = taken = 0
        if self._early and not self._begun():
            return 0, 0
        if self.way == "kill -9" and self.kills == len(self.processes):
            repair_trace(self.trace)
            if not check_trace(self.trace).clean:
                self.faults.append("faults after repair")
        with open_trace(self.trace) as trace:
            for rank in self.ranks:
                log = self.folder / f"log{rank}"
                data = log.read_bytes() if log.exists() else b""
                digests = [data[place : place + _DIGEST] for place in range(0, len(data), _DIGEST)]
                infos = [info for info in trace.tensors if info.rank == rank]
                steps = trace.steps(infos[0].name, rank=rank).tolist() if infos else []
                for step in steps:
                    values = b"".join(trace.read(info.name, step, rank=rank).tobytes() for info in infos)
                    if hashlib.blake2b(values).digest() != digests[step]:
                        self.faults.append(f"rank {rank}, step {step}: other values")
                kept, taken = kept + len(steps), taken + len(digests)
                self._check_missing(trace, rank, steps, len(digests))
            missing = taken - kept
            # A process that came so late that it took no step has no part.
            whole = not missing and {info.rank for info in trace.tensors} == set(self.ranks)
            expected = "complete" if self.way in ("SIGSTOP", "Ctrl-C") and whole else "interrupted"
            # Ctrl-C may also have come before the program was over.
            early = self.way == "Ctrl-C" and not all(_ANSWERED.search(process.said) for process in self.processes)
            if trace.status != expected and not early:
                found = [part.get("status") for part in parts(self.trace)] if self.trace.suffix == ".zarr" else []
                self.faults.append(f"status {trace.status} instead of {expected}: {trace.attrs['status']} of {found}")
        return kept, taken

    def _codes(self) -> tuple[int, ...]:
        launched = self._several
        return {
            "kill -9": (0, -signal.SIGKILL),
            "SIGTERM": (-signal.SIGTERM,),
            # Python's own end if Ctrl-C comes after that of gtrace.
            "Ctrl-C": (0, 130, -signal.SIGINT),
            "SIGSTOP": (0,),
            "full disk": (0,),
            "deleted": (0,) if launched else (3,),
        }[self.way]

    def _check_missing(self, trace: Any, rank: int, steps: list[int], taken: int) -> None:
        """Every step that is missing must be named by the trace, or be one of the last ones of a killed process."""
        from gtrace.capture.options import parse_steps
        from gtrace.trace.shared import parts

        if self.way == "kill -9" and self.processes[rank].code == -signal.SIGKILL:
            if steps != list(range(len(steps))):
                self.faults.append(f"rank {rank}: steps are missing in between")
            return
        own = {part.get("rank", 0): part for part in parts(self.trace)} if self.trace.suffix == ".zarr" else {}
        listed = own.get(rank, trace.attrs).get("capture", {}).get("unwritten", {}).get("0")
        said = self.processes[rank].said
        if self.way == "full disk" and ("could not be written" in said or "nothing was captured" in said):
            return  # not even that had room
        named = parse_steps(listed) if listed else None
        # The step that a signal cuts short may have been written down and not taken.
        for step in sorted(set(range(taken - 1)) - set(steps)):
            if named is None or not named.wants(step, sys.maxsize):
                self.faults.append(f"rank {rank}: step {step} of {taken} is missing, and the trace does not say so")
                return


class Chain:
    """A command that is interrupted several times and then left alone.

    Args:
        starter: starts its processes.
        folder: an empty folder.
        way: ``kill -9``, or for a sweep ``full disk`` and ``deleted``.
        output: a key of ``COMMANDS``.
        undisturbed: how it ends undisturbed; its duration is brought up to date.
        rng: decides when.
        fresh: start interpreters instead of forking.
    """

    def __init__(
        self,
        starter: Starter,
        folder: Path,
        way: str,
        output: str,
        undisturbed: Undisturbed,
        rng: random.Random,
        *,
        fresh: bool,
    ) -> None:
        self._starter, self._folder, self._way, self._output = starter, folder, way, output
        self._undisturbed, self._rng, self._fresh = undisturbed, rng, fresh
        self._disk = folder / "disk"
        self._disk.mkdir()
        self._faults: list[str] = []

    def done(self) -> Result:
        """Start it, interrupt it, and look at what is left."""
        if self._way != "full disk":
            return self._done(None)
        place = self._undisturbed.folder
        used = sum(4096 + path.stat().st_size for name in INPUTS for path in (place / name).rglob("*"))
        room = int(self._rng.uniform(0.1, 0.9) * (place / self._output).stat().st_size)
        with small_disk(self._disk, used + room) as mounted:
            return self._done(None if mounted else room)

    def _done(self, limit: int | None) -> Result:
        for name in INPUTS:
            place = self._undisturbed.folder / name
            (shutil.copytree if place.is_dir() else shutil.copy)(place, self._disk / name)
        wanted = self._undisturbed.contents
        kills = late = 0
        for left in reversed(range(self._rng.randint(2, KILLS) if self._way == "kill -9" else 1)):
            moment = self._rng.uniform(0, self._undisturbed.seconds) if left or self._way == "deleted" else HUNG
            whole, began = len(list(self._disk.iterdir())) == len(INPUTS), time.monotonic()
            process = self._interrupted(moment, limit)
            if whole and process.code == 0:
                # The machine is busier at some times than at others.
                self._undisturbed.seconds += (time.monotonic() - began - self._undisturbed.seconds) / 4
            found = contents(self._disk / self._output)
            if not set(found) <= set(wanted):
                self._faults.append(f"other contents after kill {kills}")
            if process.code == -signal.SIGKILL:
                kills += 1
                late += len(list(self._disk.iterdir())) > len(INPUTS)
                self._faults += ["hangs"] * (not left)
            if found == wanted and "--force" not in COMMANDS[self._output]:
                break  # it came to its end, even if it was killed after it
        if self._way == "kill -9":
            expected, words = (0, -signal.SIGKILL), ""
        elif self._way == "deleted":
            # No such trace: it was deleted before it was opened.
            expected, words = (0, 3), "" if process.code == 0 else "is gone|no such trace"
        else:
            expected, words = (3,), "cannot be written"
        if process.code not in expected or not re.search(words, process.said) or "Traceback" in process.said:
            self._faults.append(f"exit code {process.code}: {process.said[-300:]}")
        found, more = contents(self._disk / self._output), self._leftovers()
        if not set(found) <= set(wanted) or (process.code == 0 and (found != wanted or more)):
            self._faults.append(f"the end differs: {len(found)} of {len(wanted)} parts, {more}")
        return Result(0, kills, late, wrong="; ".join(self._faults))

    def _leftovers(self) -> list[str]:
        """Names that an undisturbed run does not leave, but for an hour what a killed import wrote."""
        names = {path.name for path in self._disk.iterdir()} - {*INPUTS, self._output}
        return [name for name in names if not name.startswith(f".{self._output}.gtrace-import-")]

    def _interrupted(self, seconds: float, limit: int | None) -> Process:
        """Start it, and interrupt it if it has not ended after these seconds."""
        words = COMMANDS[self._output].split()
        process = self._starter.start(self._disk, "../said", words, fresh=self._fresh, limit=limit)
        end = time.monotonic() + seconds
        while not process.ended() and time.monotonic() < end:
            time.sleep(_LOOK / 4)
            if seconds == HUNG and time.monotonic() > end:
                # Seconds without a core do not count.
                seconds, end = math.inf, end + max(process.delays().values(), default=0) / 1e9
        if self._way == "deleted":
            os.rename(self._disk / "run.zarr", self._folder / "gone")
            end = time.monotonic() + HUNG
            while not process.ended() and time.monotonic() < end:
                time.sleep(_LOOK)
        process.send(signal.SIGKILL)
        while not process.ended():
            time.sleep(_LOOK / 4)
        if process.left():
            self._faults.append("a process is left")
        return process


@dataclass
class Undisturbed:
    """How a command ends that is left alone.

    Attributes:
        folder: that it leaves.
        contents: of its output there.
        seconds: that it takes.
    """

    folder: Path
    contents: list[str]
    seconds: float


def contents(path: Path) -> list[str]:
    """The parts of an output that are the same in every run; none if there is none.

    Raises:
        AssertionError, TraceError: half an output is there.
    """
    from gtrace.planning import load_plan
    from gtrace.sweep import ResultStore
    from gtrace.trace import open_trace

    if not path.exists():
        return []
    if path.suffix == ".db":
        try:
            return [repr(row) for row in ResultStore.load(path).rows()]
        except TraceError as error:
            if "meta is not a table" not in str(error):
                raise
            return []  # it was killed before it had any
    if path.suffix == ".html":
        text = path.read_text()
        assert text.rstrip().endswith("</html>"), "half a page"
        return [text]
    if path.suffix == ".toml":
        return [repr(load_plan(path).tensors)]
    if path.suffix == ".jsonl":
        records = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        return [f"{record['run']} {record['step']} {record['loss']}" for record in records if "step" in record]
    with open_trace(path) as trace:
        return [trace.fingerprint]


class Counted(NamedTuple):
    """What is stored of the runs of one kind; what it counts is that of ``Result``."""

    seed: int
    command: str
    way: str
    processes: int
    suffix: str
    fresh: bool
    runs: int = 0
    right: int = 0
    kills: int = 0
    late: int = 0
    kept: int = 0
    taken: int = 0
    seconds: float = 0.0

    def plus(self, result: Result) -> Counted:
        """With one run more."""
        more = {name: getattr(self, name) + getattr(result, name) for name in ("kills", "late", "kept", "taken")}
        seconds = max(self.seconds, result.seconds)
        return self._replace(runs=self.runs + 1, right=self.right + (not result.wrong), seconds=seconds, **more)


def table(stored: list[dict[str, Any]]) -> str:
    """Markdown of what is stored, a row for each command and way."""
    lines = [
        "| command | what happens | runs | right | processes killed | after their first write | longest end |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for kind in dict.fromkeys((row["command"], row["way"]) for row in stored):
        rows = [Counted(**row) for row in stored if (row["command"], row["way"]) == kind]
        runs, right, kills, late = (sum(getattr(row, name) for row in rows) for name in Counted._fields[6:10])
        longest = max(row.seconds for row in rows)
        cells = [*kind, f"{runs:,}", f"{right:,}", *((f"{kills:,}", f"{late:,}") if kills else ("", ""))]
        lines.append(f"| {' | '.join(cells)} | {f'{longest:.2f} s' if longest else ''} |")
    return "\n".join(lines) + "\n"


class Series:
    """Runs, several at a time, and what is counted of them.

    Args:
        choice: the options.
        scratch: an empty folder.
    """

    def __init__(self, choice: argparse.Namespace, scratch: Path) -> None:
        self._choice = choice
        kinds = [(count, suffix) for count in (1, 4) for suffix in SUFFIXES]
        self._captures = [("capture", way, *kind) for kind in kinds for way in choice.ways]
        others = [(output, "kill -9", 1, "") for output in COMMANDS]
        others += [("out.db", way, 1, "") for way in ("full disk", "deleted")]
        self._others = [kind for kind in others if kind[1] in choice.ways]
        stored = json.loads(choice.output.read_text()) if choice.output and choice.output.exists() else []
        self._stored = [row for row in stored if row["seed"] != choice.seed]
        self._counts: dict[Any, Counted] = {}
        self._counting = threading.Lock()
        self._starter = Starter(scratch)
        self._undisturbed = {}
        for output in COMMANDS:
            seconds = self._starter.time(scratch, output)
            self._undisturbed[output] = Undisturbed(scratch, contents(scratch / output), seconds)
        self._numbers = iter(range(choice.runs))
        self._end = time.monotonic() + 60 * choice.minutes

    @property
    def rows(self) -> list[dict[str, Any]]:
        """What is stored, and what was counted now."""
        return [*self._stored, *(row._asdict() for row in self._counts.values())]

    def done(self) -> bool:
        """Whether all runs were right, after all of them."""
        signal.signal(signal.SIGINT, lambda *_: setattr(self, "_end", -math.inf))
        with ThreadPoolExecutor(self._choice.beside) as pool:
            for lane in [pool.submit(self._lane) for _ in range(self._choice.beside)]:
                lane.result()
        self._starter.close()
        return all(row.right == row.runs for row in self._counts.values())

    def _lane(self) -> None:
        """One run after the other."""
        for number in self._numbers:
            if time.monotonic() > self._end:
                return
            # A stride, so that a few runs have all ways, both formats, and one process as well as four.
            half = number // 2
            kinds, place = (self._others, half) if number % 2 else (self._captures, 5 * half)
            output, way, count, suffix = kinds[place % len(kinds)]
            every = self._choice.fresh
            fresh = bool(every) and number % every == every - 1
            try:
                result = self._run(number, output, way, suffix, count, fresh=fresh)
            except (AssertionError, GtraceError, OSError, ValueError) as error:
                # What is left can't be read.
                result = Result(0, wrong="".join(traceback.format_exception(error)))
            command = COMMANDS.get(output, output).removeprefix("trace ").partition(" ")[0]
            kind = self._choice.seed, command, way, count, suffix, fresh
            with self._counting:
                self._counts[kind] = self._counts.get(kind, Counted(*kind)).plus(result)
                if result.wrong:
                    print(f"run {number}, {output}, {way}, {suffix}, {count}: {result.wrong}", flush=True)
                if self._choice.output:
                    beside = self._choice.output.with_suffix(".partial")
                    beside.write_text("[\n" + ",\n".join(map(json.dumps, self.rows)) + "\n]\n")
                    beside.replace(self._choice.output)

    def _run(self, number: int, output: str, way: str, suffix: str, count: int, *, fresh: bool) -> Result:
        rng = random.Random(f"{self._choice.seed} {number}")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            if output == "capture":
                return Run(self._starter, Path(folder), way, suffix, count, rng, fresh=fresh).done()
            left = self._undisturbed[output]
            return Chain(self._starter, Path(folder), way, output, left, rng, fresh=fresh).done()


def main() -> int:
    """Print the table; 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description="Interrupt commands at random moments and check what is left.")
    parser.add_argument("--runs", type=int, default=500, help="spread over commands, ways, formats and processes")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after this time")
    parser.add_argument("--beside", type=int, default=1, help="runs at a time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=50, help="start interpreters in every n-th run, 0 for never")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("-o", "--output", type=Path, help="JSON to write; runs of other seeds that are there are kept")
    with tempfile.TemporaryDirectory(prefix="gtrace-interruptions-") as scratch:
        series = Series(parser.parse_args(), Path(scratch))
        right = series.done()
    print(table(series.rows))
    return int(not right)


if __name__ == "__main__":
    if sys.argv[1:2] != ["--serve"]:
        sys.exit(main())
    if (request := serve(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])) is not None:
        end_of(request)
