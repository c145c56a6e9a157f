"""The flags of runs in several processes, and schedulers that start them."""

import os
import shutil
import subprocess
import sys

import pytest
from commands import PROGRAM, ROOT, Run, environment, execute

from experiments.cli.errors import BadRequest
from experiments.launch.membership import Membership, requested
from experiments.training.config import parse

BY_HAND = "--coordinator a:9999 --process-id 1 --num-processes 4"


@pytest.mark.parametrize(
    "command, expected",
    [
        ("", None),
        ("--processes 1", None),
        ("--processes 4", Membership(4)),
        (BY_HAND, Membership(4, 1, "a:9999")),
        (f"{BY_HAND} --process-id 0", Membership(4, 0, "a:9999")),
    ],
)
def test_flags_say_which_processes_there_are(command, expected):
    assert requested(parse(command.split())) == expected


@pytest.mark.parametrize(
    "command, words",
    [
        ("--processes 0", "--processes must be a whole number of at least 1"),
        ("--processes 3", "8 workers do not divide over 3 processes: use a multiple"),
        ("--processes 2 --backend vmap", "vmap runs on one device, not in 2 processes"),
        (f"--processes 2 {BY_HAND}", "say one of them"),
        (f"--distributed auto {BY_HAND}", "say one of them"),
        ("--distributed atuo", "did you mean 'auto'"),
        ("--process-id 1", "--process-id goes with --coordinator"),
        ("--num-processes 2", "--num-processes goes with --coordinator"),
        ("--coordinator a:9999 --process-id 0", "goes with --num-processes"),
        ("--coordinator a:9999 --num-processes 2", "goes with --process-id"),
        (f"{BY_HAND} --process-id 4", "--process-id must be 0 to 3 of 4 processes"),
        (f"{BY_HAND} --coordinator a", "--coordinator must be"),
        (f"{BY_HAND} --coordinator a:99999", "--coordinator must be"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(command, words):
    with pytest.raises(BadRequest) as refused:
        requested(parse(command.split()))
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_auto_without_a_scheduler_says_what_to_do(monkeypatch):
    for name in list(os.environ):
        if name.startswith(("SLURM", "OMPI", "KUBERNETES")):
            monkeypatch.delenv(name)
    with pytest.raises(BadRequest, match="no Slurm, Open MPI or Kubernetes"):
        requested(parse(["--distributed", "auto"]))


def slurm(process):
    """Slurm's variables for a step of two tasks on one node."""
    return {
        "SLURM_JOB_ID": 4000 + os.getpid() % 90,  # of which jax makes the port
        "SLURM_STEP_NODELIST": "127.0.0.1",
        "SLURM_NTASKS": 2,
        "SLURM_PROCID": process,
        "SLURM_LOCALID": process,
        "SLURM_STEP_NUM_NODES": 1,
    }


def test_slurm_says_who_a_process_is(monkeypatch):
    for name, value in slurm(1).items():
        monkeypatch.setenv(name, str(value))
    found = requested(parse(["--distributed", "auto"]))
    assert found is not None
    assert (found.processes, found.process) == (2, 1)
    assert str(found.coordinator).startswith("127.0.0.1:")


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["slurm", "mpirun"])
def test_processes_that_a_scheduler_started_find_each_other(scheduler, tmp_path):
    if scheduler == "mpirun" and not shutil.which("mpirun"):
        pytest.skip("mpirun is not installed")
    command = "--steps 32 --eval-every 16"
    words = [*PROGRAM, *command.split(), "--distributed", "auto"]
    words += ["--out", str(tmp_path / "out")]
    # Bound to one core, XLA would round otherwise than on two.
    mpirun = "mpirun --bind-to none --allow-run-as-root --oversubscribe -n 2"
    starts = {
        "mpirun": [([*mpirun.split(), *words], {})],
        "slurm": [(words, slurm(process)) for process in (0, 1)],
    }
    processes = [
        subprocess.Popen(
            line,
            cwd=ROOT,
            env=environment(JAX_NUM_CPU_DEVICES=1, **variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=sys.stderr,
            encoding="utf-8",
        )
        for line, variables in starts[scheduler]
    ]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes)
    assert sum("test accuracy" in text for text in printed) == 1  # the first speaks
    ended = Run(0, "", "", tmp_path / "out")
    alone = execute(command, tmp_path / "alone")
    assert ended.summary["params_sha256"] == alone.summary["params_sha256"]
