"""A Dask scheduler and its workers as real processes, and what is left of them.

with cluster(tmp_path, workers=2) as dask:
    command = dask.run("--steps 32 --processes 2")     # experiments.run
    dask.workers[0].kill()
    dask.worker()                                      # one more
    command.ended()
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager
from pathlib import Path

import pytest
from commands import PROGRAM, TIMEOUT, environment, execute
from commands import Command as Started
from faults import TAG, Command, members, tagged, until
from lasting import OURS

DASK = [sys.executable, "-m", "dask"]
COMPARE = [sys.executable, "-m", "experiments.compare"]
# Dask's own: seconds in which the scheduler notices a worker that says nothing.
QUICK = {"DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "20s"}


RUN = "--task tiny_tasks:drawing --width 2000 --workers 2 --optimizer adam --steps 60 "
RUN += "--eval-every 20 --checkpoint-every 1 --processes 2"


def undisturbed(out):
    """Makes RUN on this machine, where nothing befalls it."""
    ended = execute(RUN, out, JAX_NUM_CPU_DEVICES=1, PYTHONPATH=OURS)
    assert ended.code == 0, ended.stderr
    return ended


class Node(Started):
    """A scheduler or a worker."""

    def kill(self, number=signal.SIGKILL):
        """Sends it a signal, and waits for the end of one that is killed."""
        super().kill(number)
        if number == signal.SIGKILL:
            self.process.wait(TIMEOUT)


class DaskCluster:
    """A scheduler, its workers, and the commands that use them.

    Attributes:
        workers: in the order of their start.
        address: of the scheduler.
    """

    def __init__(self, folder, devices, host, flags, prefix, environ):
        self.folder, self.tag = folder, uuid.uuid4().hex
        self.workers, self.commands, self._nodes = [], [], []
        self._host, self._flags, self._devices = host, flags, devices
        self._prefix = prefix
        self._given = environ
        self._environ = {TAG: self.tag, "PYTHONPATH": OURS, **QUICK, **environ}
        self.file = folder / "scheduler.json"

    def start_scheduler(self):
        """Starts the scheduler, and waits until it listens."""
        self.file.unlink(missing_ok=True)
        words = f"scheduler --host {self._host} --port 0".split()
        # Without this its pages are at all addresses, even by --no-dashboard.
        words += ["--dashboard-address", f"{self._host}:0"]
        words += [*self._flags, "--scheduler-file", str(self.file)]
        self.scheduler = self._node(words, "scheduler", self._prefix, self._environ)
        # Dask opens the file before it writes into it.
        until(
            lambda: self.file.exists() and self.file.read_text().endswith("}"),
            "the scheduler listens",
        )
        self.address = json.loads(self.file.read_text())["address"]

    def worker(self, prefix=None, host=None, nanny=False, **environ):
        """Starts one more worker of one thread.

        Args:
            prefix: of its command; None is the cluster's.
            host: its address.
            nanny: whether another process starts it again when it is lost.
            environ: of its process, besides the cluster's.
        """
        name = f"worker-{len(self.workers)}"
        words = f"worker --nthreads 1 --name {name}".split()
        words += ["--nanny" if nanny else "--no-nanny"]
        own = host or self._host
        words += ["--host", own, "--dashboard-address", f"{own}:0"]
        words += ["--death-timeout", "60"]
        words += ["--local-directory", str(self.folder / name), *self._flags]
        words += [self.address]
        environ = {"JAX_NUM_CPU_DEVICES": self._devices, **environ}
        before = self._prefix if prefix is None else prefix
        node = self._node(words, name, before, {**self._environ, **environ})
        self.workers.append(node)
        return node

    def _node(self, words, name, prefix, environ):
        argv = [*prefix, *DASK, *words]
        self._nodes.append(Node(argv, self.folder, name, environment(**environ)))
        return self._nodes[-1]

    def run(self, words, out=None, devices=1, **environ):
        """Starts `experiments.run WORDS --scheduler ADDRESS`."""
        return self._start(PROGRAM, words, out or self.folder / "out", devices, environ)

    def study(self, words, out, **environ):
        """Starts `experiments.compare WORDS --scheduler ADDRESS`."""
        return self._start(COMPARE, words, out, self._devices, environ)

    def _start(self, program, words, out, devices, environ):
        self.commands.append(
            Command(
                f"{words} --scheduler {self.address}",
                out,
                self.tag,
                len(self.commands),
                devices,
                {**self._given, **environ},
                [*self._prefix, *program],
            )
        )
        return self.commands[-1]

    def makers(self):
        """The pids of the processes in which workers make runs of studies."""
        found = (Path(f"/proc/{pid}/cmdline") for pid in tagged(self.tag))
        return [int(x.parent.name) for x in found if _is_maker(x)]

    def members(self):
        """The pids of the processes that workers have started, by their numbers."""
        return members(self.tag)

    def member(self, number):
        """The pid of such a process, once it has started."""
        return until(lambda: self.members().get(number), f"process {number} starts")

    def worker_of(self, pid):
        """The worker that has started a process."""
        stat = Path(f"/proc/{pid}/stat").read_text()
        parent = int(stat.rpartition(")")[2].split()[1])
        return next(worker for worker in self.workers if worker.pid == parent)

    def close(self):
        """Ends all that is left."""
        for node in reversed(self._nodes):
            if node.process.poll() is None:  # it may be stopped
                node.kill()
        for pid in tagged(self.tag):
            os.kill(pid, signal.SIGKILL)
        for command in self.commands:
            command.process.wait(TIMEOUT)


def _is_maker(path):
    try:
        return b"experiments.study.running.child" in path.read_bytes()
    except OSError:  # it has ended
        return False


@contextmanager
def cluster(
    folder, workers=0, devices=1, host="127.0.0.1", flags=(), prefix=(), **environ
):
    """Yields a cluster; in the end its workers must have no process left.

    Args:
        folder: for logs and files.
        workers: how many start at once.
        devices: JAX_NUM_CPU_DEVICES of each.
        host: the address of the scheduler and the workers.
        flags: of both, such as those of TLS.
        prefix: of all commands, such as `ip netns exec NAME`.
        environ: of all processes.
    """
    if not Path("/proc/self/environ").exists():
        pytest.skip("what is left is looked for in /proc")
    dask = DaskCluster(folder, devices, host, flags, prefix, environ)
    try:
        dask.start_scheduler()
        for _ in range(workers):
            dask.worker()
        yield dask
        until(lambda: not dask.members(), "no process of a run is left", limit=30)
        until(lambda: not dask.makers(), "no process of a study is left", limit=30)
    finally:
        dask.close()


def certificates(folder):
    """Makes an authority and a certificate: Dask's settings of TLS as variables."""
    if not shutil.which("openssl"):
        pytest.skip("certificates take the program openssl")
    made = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=syncalgos"
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = [*made.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT)
    found = {"DASK_DISTRIBUTED__COMM__TLS__CA_FILE": cert}
    for role in ("CLIENT", "SCHEDULER", "WORKER"):
        found[f"DASK_DISTRIBUTED__COMM__TLS__{role}__CERT"] = cert
        found[f"DASK_DISTRIBUTED__COMM__TLS__{role}__KEY"] = key
    return {name: str(path) for name, path in found.items()}
