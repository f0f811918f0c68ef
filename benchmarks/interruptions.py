"""Interrupts captures in every way, at moments drawn at random, and checks what is left.

    python benchmarks/interruptions.py [--runs 500] [--seed 0] [--fresh 10] [-o FILE.json]

Each run is one process or four that train a small network under ``gtrace capture``, every step recorded, and write down
a digest of each gradient themselves. After the first commit something happens: kill -9 of one process, SIGTERM to all,
Ctrl-C once or twice while the last steps are being written, SIGSTOP of one process, a full disk, or the trace is
deleted. Where processes are left, they then come to their own end. A run is right if

- every step in the trace has the values that the program wrote down, and the trace names those that are missing
  (after kill -9 the last ones are missing);
- status, exit code and the last words are those that the documentation promises;
- every process that can end does so within two seconds of the last signal, or of its own end, and none is left. After
  one Ctrl-C it may take as long as writing takes. Seconds in which a process was ready and others had the cores do not
  count.

Processes are forked from one that has imported torch and opened no trace; every tenth run (``--fresh``) starts an
interpreter for each. Prints a table, and with ``-o`` stores it with the seconds of every run.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import hashlib
import json
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
import time
from pathlib import Path
from typing import Any, NamedTuple

WAYS = ("kill -9", "SIGTERM", "Ctrl-C", "SIGSTOP", "full disk", "deleted")
#: seconds in which a process ends, and after which one that does not has hung
PROMISED, HUNG = 2.0, 60.0
#: seconds between two looks
_LOOK = 0.01
#: bytes of the disk that becomes full
DISK = 4_000_000

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
        """Whether anything of its group still runs."""
        try:
            os.killpg(self.pid, 0)
        except ProcessLookupError:
            return False
        os.killpg(self.pid, signal.SIGKILL)
        return True


class Starter:
    """Starts processes: forked ones, which become children of this process, or new interpreters."""

    def __init__(self) -> None:
        ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, __file__, "--serve", str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._server = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def start(self, folder: Path, name: str, arguments: list[str], rank: int | None = None, **more: Any) -> Process:
        """Start one in ``folder``; its words go to ``NAME.txt`` there."""
        place = {} if rank is None else {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}
        said = folder / f"{name}.txt"
        request = {"folder": str(folder), "said": str(said), "env": place, "args": arguments, "limit": None} | more
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
        self._ours.send(json.dumps(request).encode())
        return Process(int(self._ours.recv(64)), said)

    def close(self) -> None:
        """End the server."""
        self._ours.close()
        self._server.wait()


def serve(descriptor: int, parent: int) -> bool:
    """Fork a process for each request, with ``parent`` as its parent; True in those."""
    import torch
    import zarr  # noqa: F401 - what all of them import

    import gtrace.capture.recorder
    import gtrace.capture.session
    import gtrace.trace.hdf5
    import gtrace.trace.shared  # noqa: F401

    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # imports more of torch than all else
    gc.freeze()  # pages that are not touched are not copied
    requests = socket.socket(fileno=descriptor)
    while message := requests.recv(1 << 16):
        if (between := os.fork()) == 0:
            if (pid := os.fork()) != 0:
                requests.send(str(pid).encode())
                os._exit(0)
            requests.close()
            # A launch is known by the parent of its processes.
            while os.getppid() != parent:
                time.sleep(0.001)
            become(json.loads(message))
            return True
        os.waitpid(between, 0)
    return False


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


class Result(NamedTuple):
    """One run: how long its processes took to end, steps in the trace and taken, and what is wrong, if anything."""

    seconds: float
    kept: int
    taken: int
    wrong: str


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

    def done(self) -> Result:
        """Start it, interrupt it, and look at what is left."""
        limit = None
        mounted = False
        if self.way == "full disk":
            command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(self.disk)]
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
            limit = None if mounted else 150_000
        try:
            steps = {"Ctrl-C": self._rng.randrange(20, 300), "full disk": 60}.get(self.way, -1)
            count = 4 if self._several else 1
            for rank in range(count):
                arguments = ["capture", *self._options, "-o", str(self.trace), "train.py", str(steps), str(self.folder)]
                more = {"rank": rank} if self._several else {}
                self.processes.append(
                    self._starter.start(self.folder, f"said{rank}", arguments, fresh=self._fresh, limit=limit, **more)
                )
            self._wait(self._begun, "no step is committed", 10 * HUNG)
            seconds = self._interrupt()
            for process in self.processes:
                if process.left():
                    self.faults.append("a process is left")
            kept, taken = self._compare()
        finally:
            for process in self.processes:
                if not process.ended():
                    os.killpg(process.pid, signal.SIGKILL)
                    os.waitpid(process.pid, 0)
            if mounted:
                subprocess.run(["umount", str(self.disk)], check=True)
        return Result(round(seconds, 3), kept, taken, "; ".join(self.faults))

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
        victim = self._rng.choice([self.processes[rank] for rank in self.ranks])
        if self.way in ("Ctrl-C", "full disk"):
            self._over(running)
        else:
            time.sleep(self._rng.uniform(0, 0.4))
            self._hit(victim, running)
        if self.way == "Ctrl-C":
            self._press(running)
        elif self.way not in ("SIGTERM", "full disk"):
            (self.folder / "stop").touch()
            self._over(running)
        seconds = self._end(running)
        if self.way == "SIGSTOP":
            victim.send(signal.SIGCONT)
            self._wait(victim.ended, "hangs after SIGCONT")
        if seconds > PROMISED and self.presses != 1:
            self.faults.append(f"takes {seconds:.1f} s to end")
        return seconds

    def _hit(self, victim: Process, running: list[Process]) -> None:
        """What happens to one process or all while they train; takes those away from ``running`` that are stopped."""
        if self.way == "kill -9":
            victim.send(signal.SIGKILL)
            self._wait(victim.ended, "survives kill -9")
        elif self.way == "SIGTERM":
            for process in running:
                process.send(signal.SIGTERM)
        elif self.way == "SIGSTOP":
            victim.send(signal.SIGSTOP)
            running.remove(victim)
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
            expected = "complete" if self.way in ("SIGSTOP", "Ctrl-C") and not missing else "interrupted"
            # Ctrl-C may also have come before the program was over.
            early = self.way == "Ctrl-C" and not all(_ANSWERED.search(process.said) for process in self.processes)
            if trace.status != expected and not early:
                self.faults.append(f"status {trace.status} instead of {expected}")
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


def main() -> int:
    """Print the table; 1 if a run was wrong."""
    parser = argparse.ArgumentParser(description="Interrupt captures at random moments and check what is left.")
    parser.add_argument("--runs", type=int, default=500, help="spread over ways, formats and numbers of processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", type=int, default=10, help="start interpreters in every n-th run, 0 for never")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("-o", "--output", type=Path, help="JSON to write; runs of other seeds that are there are kept")
    choice = parser.parse_args()
    kinds = [(way, suffix, count) for count in (1, 4) for suffix in (".zarr", ".h5") for way in choice.ways]
    starter, faults = Starter(), []
    stored = json.loads(choice.output.read_text()) if choice.output and choice.output.exists() else []
    rows = [row for row in stored if row["seed"] != choice.seed]
    for number in range(choice.runs):
        # A stride, so that a few runs have all ways, both formats, and one process as well as four.
        way, suffix, count = kinds[5 * number % len(kinds)]
        fresh = bool(choice.fresh) and number % choice.fresh == choice.fresh - 1
        rng = random.Random(f"{choice.seed} {number}")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            result = Run(starter, Path(folder), way, suffix, count, rng, fresh=fresh).done()
        about = {"seed": choice.seed, "run": number, "way": way, "suffix": suffix, "processes": count, "fresh": fresh}
        rows.append(about | result._asdict())
        if result.wrong:
            faults.append(f"run {number}, {way}, {suffix}, {count}: {result.wrong}")
            print(faults[-1], flush=True)
        if choice.output:
            choice.output.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    starter.close()
    print("| what happens | runs | right | steps in traces | steps missing | longest end |\n|---|--:|--:|--:|--:|--:|")
    for way in choice.ways:
        found = [row for row in rows if row["way"] == way]
        right = sum(not row["wrong"] for row in found)
        kept, taken = (sum(row[name] for row in found) for name in ("kept", "taken"))
        longest = max((row["seconds"] for row in found), default=0.0)
        print(f"| {way} | {len(found)} | {right} | {kept:,} | {taken - kept:,} | {longest:.2f} s |")
    return 1 if faults else 0


if __name__ == "__main__":
    if sys.argv[1:2] != ["--serve"]:
        sys.exit(main())
    if serve(int(sys.argv[2]), int(sys.argv[3])):
        runpy.run_module("gtrace", run_name="__main__", alter_sys=True)
