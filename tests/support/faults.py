"""Commands that are made to fail, and what is left of them, by their environment."""

import os
import shlex
import shutil
import signal
import subprocess
import uuid
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from experiments.processes.starter import VARIABLE
from support.commands import PROGRAM, TIMEOUT, EndedRun, environment, until
from support.commands import EndedCommand as Started
from support.resumed_runs import OURS

TAG = "SYNCALGOS_TEST"  # a variable of all that a test starts


class Command(Started):
    """A command that makes a run or a study."""

    def __init__(self, words, out, tag, number, devices, environ, program=PROGRAM):
        self.run_out = out
        self.tag = tag
        own_variables = {"JAX_NUM_CPU_DEVICES": devices, "PYTHONPATH": OURS, TAG: tag}
        argv = [*program, *shlex.split(words), "--out", str(out)]
        environ = environment(**{**own_variables, **environ})
        super().__init__(argv, out.parent, number, environ)

    def ended(self, limit=TIMEOUT):
        """Its output, and its exit code."""
        code = self.process.wait(limit)
        return EndedRun(
            code, self.out.read_text("utf-8"), self.stderr_text, self.run_out
        )

    def member(self, number):
        """The pid of a process that it has started, once it has."""
        return until(lambda: members(self.tag).get(number), f"process {number}")


def tagged(tag):
    """The environments of all processes with a tag, by pid."""
    environments = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        environ = dict(word.split(b"=", 1) for word in words if b"=" in word)
        if environ.get(TAG.encode()) == tag.encode():
            environments[int(folder.name)] = environ
    return environments


def members(tag):
    """The pids of the processes that commands have started, by their numbers."""
    pids = [pid for pid, environ in tagged(tag).items() if VARIABLE.encode() in environ]
    words = {
        pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in pids
    }
    return {int(x[x.index(b"--process-id") + 1]): pid for pid, x in words.items()}


@contextmanager
def commands(folder, **environ):
    """Yields start(words), which starts a command; in the end nobody may be left."""
    if not Path("/proc/self/environ").exists():
        pytest.skip("what is left is looked for in /proc")
    tag = uuid.uuid4().hex
    started = []

    def start(words, out=folder / "out", devices=1, program=PROGRAM):
        number = len(started)
        started.append(Command(words, out, tag, number, devices, environ, program))
        return started[-1]

    try:
        yield start
        until(lambda: not tagged(tag), "no process is left", limit=20)
    finally:
        for pid in tagged(tag):
            os.kill(pid, signal.SIGKILL)
        for command in started:
            command.process.wait(TIMEOUT)


def by_hand(address, number, words, count=2):
    """The flags of one of several processes that are started one by one."""
    return (
        f"{words} --coordinator {address} --num-processes {count} --process-id {number}"
    )


def listening(pids):
    """The addresses at which processes listen."""
    sockets = []
    for pid in pids:
        sockets += psutil.Process(pid).net_connections("tcp")
    addresses = [x.laddr.ip for x in sockets if x.status == psutil.CONN_LISTEN]
    return [x.removeprefix("::ffff:") for x in addresses]


def is_halted(pid):
    """Whether a process is stopped, as by SIGSTOP."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@contextmanager
def small_disk(folder, size):
    """Mounts a small disk; skips the test where that may not be done."""
    folder.mkdir()
    if not shutil.which("mount") or os.geteuid():
        pytest.skip("only root may mount a small disk")
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    if mounted.returncode:
        pytest.skip(f"no small disk can be mounted: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        while folder.is_mount():
            subprocess.run(["umount", str(folder)], check=True, timeout=TIMEOUT)


def remount(folder, mode):
    """Makes a disk read-only ("ro"), though a file on it is open to be written, or not.

    The kernel may do so after an error, but no command: here a mount lies over it.
    """
    over = ["mount", "--bind", str(folder), str(folder)]
    only = ["mount", "-o", "remount,ro,bind", str(folder)]
    for command in (over, only) if mode == "ro" else (["umount", str(folder)],):
        subprocess.run(command, check=True, timeout=TIMEOUT)


def fill(folder, but=0):
    """Fills a disk but for some bytes; returns the file that does."""
    path = folder / "ballast"
    with path.open("wb", buffering=0) as file:
        free_bytes = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
        file.write(bytes(free_bytes - but))
    return path
