"""Runs as a program: forks writers of traces and they kill themselves with signal 9, one after the other.

    killed_writers.py FOLDER SUFFIX STEPS STRIDE [FIRST]   just before the n-th file is moved into its place, or within
                                                           the n-th write of a file, or before or within the n-th
                                                           append to a journal; large tensors are sketched
                                                           if SUFFIX says so

Prints, for each writer, a line of JSON: its trace, the last step whose commit returned, and whether it finished.
Forked, not spawned: the imports are paid once.
"""

import json
import os
import signal
import sys
from pathlib import Path

from helpers_trace import SHAPES, gradient, write_steps

from gtrace.trace import create_trace, files, hdf5


def create_writer(path):
    return create_trace(path, sketch="l2:512,none" if "sketch" in path.name else None)


def write(path, steps, report, before):
    """Write the made-up trace; ``report`` is a pipe that gets a byte for each step that was committed."""
    count = 0

    def moment():
        nonlocal count
        count += 1
        return count > before

    def deadly(function, part=None):
        """Ends the process before a call, or after a part of it."""

        def call(*arguments):
            if moment():
                os.kill(os.getpid(), signal.SIGKILL)
            if part and moment():
                parts = b"".join(arguments[1])
                function(arguments[0], [parts[: part(len(parts))]], *arguments[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)

        return call

    os.replace = deadly(os.replace)
    os.pwritev = deadly(os.pwritev, lambda length: length * (before % 7) // 7 + 1)
    os.writev = deadly(os.writev, lambda length: length * (before % 5) // 5)
    # What closing an HDF5 trace does: arrays are written, the file takes the folder's place, the folder goes.
    hdf5._write_array, files._exchange, files.remove = map(deadly, (hdf5._write_array, files._exchange, files.remove))
    with create_writer(path) as writer:
        for step in range(steps):
            write_steps(writer, [step])
            os.write(report, b".")


def run(path, steps, before):
    """Fork a writer that kills itself, and tell what it had done."""
    read, report = os.pipe()
    child = os.fork()
    if child == 0:
        write(path, steps, report, before)
        os._exit(0)
    os.close(report)
    _, status = os.waitpid(child, 0)
    committed = 0
    while chunk := os.read(read, 4096):
        committed += len(chunk)
    os.close(read)
    print(json.dumps({"path": str(path), "committed": committed, "finished": status == 0}), flush=True)
    return status == 0


def main(folder, suffix, steps, stride, first=0):
    steps, place = int(steps), int(first)
    # What a first trace takes long for is inherited by the writers, and so are the gradients.
    with create_writer(Path(folder) / f"first{suffix}") as writer:
        write_steps(writer, range(steps if "sketch" in suffix else 0))
    for step in range(steps):
        for name in SHAPES:
            gradient(name, step)
    while not run(Path(folder) / f"run{place}{suffix}", steps, before=place):
        place += int(stride)


if __name__ == "__main__":
    main(*sys.argv[1:])
