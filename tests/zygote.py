"""Runs as a program: forks a process of a module for each request, so that importing torch is paid once.

    zygote.py DESCRIPTOR     of a socket that brings a folder, an environment, a module and its arguments, and the three
                             standard files

Answers with the process's id, and with its exit code once it is over. It ends when the other end is closed.
"""

import gc
import json
import os
import runpy
import socket
import sys

import helpers_capture  # noqa: F401 - for tests that are the program
import torch  # what all of them import

import gtrace.capture.session
import gtrace.cli
import gtrace.sweep
import gtrace.training  # noqa: F401


def asked(requests):
    """Module and arguments of the process that this one has become; None at the end of the requests."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1 << 18, 3)
        if not message:
            return None
        if (child := os.fork()) == 0:
            break
        for file in files:
            os.close(file)
        requests.send(str(child).encode())
        requests.send(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])).encode())
    requests.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    folder, environment, words = json.loads(message)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    return words


if __name__ == "__main__":
    torch.optim.SGD([torch.zeros(1)], lr=1.0)  # the first optimizer imports more of torch than all else
    gc.freeze()
    words = asked(socket.socket(fileno=int(sys.argv[1])))
    if words is not None:
        sys.argv, sys.path[0] = words, os.getcwd()
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
