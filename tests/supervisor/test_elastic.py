"""Going on with the workers that are left, with real processes that are killed."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest
from commands import ROOT, environment, execute

from experiments.elastic import main
from experiments.tasks.digits import digits
from experiments.tasks.task import Tables, Task

PROGRAM = [sys.executable, "-m", "experiments.elastic"]
BASE = ["--processes", "3", "--workers", "6", "--steps", "640", "--eval-every", "64"]
BASE += ["--dispatch-steps", "8"]  # so many are left when a process is killed
REFUSED = {
    "--resume": "--resume: only python -m experiments.run has that",
    "--coordinator a:1 --process-id 0 --num-processes 2": "--coordinator: only",
    "--distributed auto": "--distributed: only",
    "--export x.safetensors": "--export: only",
    "--partition label": "--partition: only",
    "--devices 0,1": "--devices: only",
    "--backend vmap": "--backend vmap runs on one device",
    "--processes 1": "--processes must be at least 2, got 1",
    "--workers 8": "8 workers do not divide over 3 processes",
}
LIMIT = 300  # seconds, of what takes 30
SHA = re.compile(r"params_sha256 (\w+)$")


class Started:
    """A command that runs; what it tells goes to files."""

    def __init__(self, folder):
        self.out, self.err = folder / "out", folder / "err"
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*PROGRAM, *BASE],
                cwd=ROOT,
                env=environment(JAX_NUM_CPU_DEVICES=1),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        self.members = []

    def told(self):
        """The lines on stderr."""
        return self.err.read_text().splitlines()

    def wait_for(self, text):
        """Waits for a text on stderr."""
        until(lambda: text in self.err.read_text(), text)

    def find_members(self):
        """Notes the pids of its processes, by their numbers."""
        children = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        pids = [int(pid) for path in children for pid in path.read_text().split()]
        self.members = sorted(pids, key=number)

    def ended(self):
        """The exit code, and the last line on stdout."""
        code = self.process.wait(LIMIT)
        return code, self.out.read_text().splitlines()[-1:]


def number(pid):
    """Which process of the run it is."""
    told = Path(f"/proc/{pid}/environ").read_text()
    found = re.search(r'"process": (\d+)', told)
    assert found, told
    return int(found[1])


def until(condition, what):
    """Waits for a condition."""
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def goes_on(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def started(folder):
    """Yields a command, under way; in the end none of its processes may be left."""
    command = Started(folder)
    try:
        command.wait_for("6 of 6 workers in 3 of 3 processes")
        command.find_members()
        assert len(command.members) == 3
        command.wait_for("step 128/640")
        yield command
        until(lambda: not any(map(goes_on, command.members)), "processes are left")
    finally:
        command.process.kill()
        command.process.wait()


@pytest.mark.parametrize("flags", REFUSED)
def test_what_it_does_not_do_is_refused_in_one_line(flags, capsys):
    assert main([*BASE, *flags.split()]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and told[0].startswith(f"error: {REFUSED[flags]}")


def sharded() -> Task:
    """A task whose tables lie in parts, as the flags have it; process 0 is first."""
    time.sleep(2 * (jax.process_index() > 0))
    return digits()._replace(tables=Tables(False, lambda examples: {}, "sharded"))


@pytest.mark.slow
def test_sharded_tables_are_refused_in_one_line():
    ended = subprocess.run(
        [*PROGRAM, *BASE, "--task", "test_elastic:sharded"],
        cwd=ROOT,
        env=environment(JAX_NUM_CPU_DEVICES=1, PYTHONPATH=ROOT / "tests/support"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 2
    told = ended.stderr.splitlines()  # of each process that says so at the same time
    assert told and all("error: --tables sharded" in line for line in told)


@pytest.mark.slow
@pytest.mark.parametrize("victims", [(1,), (1, 2)], ids=["one", "two"])
def test_those_that_are_left_finish_when_others_are_killed(victims, tmp_path):
    left = 3 - len(victims)
    with started(tmp_path) as command:
        for victim in victims:
            os.kill(command.members[victim], signal.SIGKILL)
        code, last = command.ended()
    told = command.told()
    assert code == 0, told
    for victim in victims:
        assert any(
            x.startswith(f"process {victim} (pid {command.members[victim]}) was killed")
            for x in told
        )
    assert sum(x.startswith("without process") for x in told) in (1, len(victims))
    assert f"with {2 * left} of 6 workers in {left} of 3 processes" in last[0]
    steps = [x for x in told if x.startswith("step ")]
    assert len(steps) == 10 and not any("nan" in x or "inf" in x for x in steps)
    accuracy = re.search(r"test accuracy ([\d.]+)", last[0])
    assert accuracy and float(accuracy[1]) > 0.85


@pytest.mark.slow
def test_process_0_is_the_one_that_must_not_be_lost(tmp_path):
    with started(tmp_path) as command:
        os.kill(command.members[0], signal.SIGKILL)
        code, last = command.ended()
    assert code == 75 and not last
    assert any("process 0 (pid" in x and "SIGKILL" in x for x in command.told())


@pytest.mark.slow
def test_while_nobody_dies_it_is_the_ordinary_run(tmp_path):
    with started(tmp_path) as command:
        code, last = command.ended()
    found = SHA.search(last[0])
    ordinary = execute(
        " ".join(BASE), tmp_path / "run", timeout=LIMIT, JAX_NUM_CPU_DEVICES=1
    )
    assert code == ordinary.code == 0 and found
    assert found[1] == ordinary.summary["params_sha256"]
