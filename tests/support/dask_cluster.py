"""A Dask scheduler and its workers as real processes, and what is left of them.

with cluster(tmp_path, workers=2) as dask:
    command = dask.study("--algos bmuf --seeds 2", out)
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

from support.commands import COMPARE, TIMEOUT, environment
from support.commands import EndedCommand as Started
from support.faults import TAG, Command, tagged, until
from support.resumed_runs import OURS

DASK = [sys.executable, "-m", "dask"]


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

    def __init__(self, folder, flags, environ):
        self.folder = folder
        self.tag = uuid.uuid4().hex
        self.workers = []
        self.commands = []
        self._nodes = []
        self._flags = flags
        self._run_variables = environ
        self._environ = {TAG: self.tag, "PYTHONPATH": OURS, **environ}
        self.file = folder / "scheduler.json"

    def start_scheduler(self):
        """Starts the scheduler, and waits until it listens."""
        self.file.unlink(missing_ok=True)
        words = "scheduler --host 127.0.0.1 --port 0 --dashboard-address 127.0.0.1:0"
        words = [*words.split(), *self._flags, "--scheduler-file", str(self.file)]
        self.scheduler = self._node(words, "scheduler", (), self._environ)
        # Dask opens the file before it writes into it.
        until(
            lambda: self.file.exists() and self.file.read_text().endswith("}"),
            "the scheduler listens",
        )
        self.address = json.loads(self.file.read_text())["address"]

    def worker(self, prefix=(), **environ):
        """Starts one more worker; `prefix` comes before its command."""
        name = f"worker-{len(self.workers)}"
        words = f"worker --nthreads 1 --no-nanny --host 127.0.0.1 --name {name}"
        words += " --dashboard-address 127.0.0.1:0 --death-timeout 60"
        words = [*words.split(), "--local-directory", str(self.folder / name)]
        words += [*self._flags, self.address]
        node = self._node(words, name, prefix, {**self._environ, **environ})
        self.workers.append(node)
        return node

    def _node(self, words, name, prefix, environ):
        argv = [*prefix, *DASK, *words]
        self._nodes.append(Node(argv, self.folder, name, environment(**environ)))
        return self._nodes[-1]

    def study(self, words, out, program=COMPARE, **environ):
        """Starts `experiments.compare WORDS --scheduler ADDRESS`."""
        words = f"{words} --scheduler {self.address}"
        variables = {**self._run_variables, **environ}
        number = len(self.commands)
        self.commands.append(
            Command(words, out, self.tag, number, 1, variables, program)
        )
        return self.commands[-1]

    def close(self):
        """Ends all that is left."""
        for pid in tagged(self.tag):  # it may be stopped
            os.kill(pid, signal.SIGKILL)
        for started in (*self._nodes, *self.commands):
            started.process.wait(TIMEOUT)


@contextmanager
def cluster(folder, workers=0, flags=(), **environ):
    """Yields a cluster.

    Args:
        folder: for logs and files.
        workers: how many start at once.
        flags: of the scheduler and the workers, such as those of TLS.
        environ: of all processes.
    """
    if not Path("/proc/self/environ").exists():
        pytest.skip("what is left is looked for in /proc")
    dask = DaskCluster(folder, flags, environ)
    try:
        dask.start_scheduler()
        for _ in range(workers):
            dask.worker()
        yield dask
    finally:
        dask.close()


def certificates(folder):
    """Makes an authority and a certificate: Dask's settings of TLS as variables."""
    if not shutil.which("openssl"):
        pytest.skip("certificates take the program openssl")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=syncalgos"
    cert = folder / "cert.pem"
    key = folder / "key.pem"
    words = [*command.split(), "-keyout", str(key), "-out", str(cert)]
    subprocess.run(words, check=True, capture_output=True, timeout=TIMEOUT)
    variables = {"DASK_DISTRIBUTED__COMM__TLS__CA_FILE": cert}
    for role in ("CLIENT", "SCHEDULER", "WORKER"):
        variables[f"DASK_DISTRIBUTED__COMM__TLS__{role}__CERT"] = cert
        variables[f"DASK_DISTRIBUTED__COMM__TLS__{role}__KEY"] = key
    return {name: str(path) for name, path in variables.items()}
