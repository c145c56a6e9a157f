"""Signals to a running command, as real processes."""

import os
import signal
import time

import pytest
from commands import CACHE, SUMMARY, TIMEOUT, Run, in_background
from faults import until

from experiments.exit_codes import handling

SIGNALS = pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), (signal.SIGTERM, 75), (signal.SIGHUP, 75)],
    ids=str,
)
LONG = "--steps 1000000 --dispatch-steps 16 --eval-every 16"


# A program that is found among those that were kept is not compiled.
COMPILES = {"JAX_LOG_COMPILES": "1", CACHE: "false"}


def pester(process, number, said, last):
    """Sends a signal all the time from a process's last line to its end."""
    until(lambda: last in said.read_text("utf-8"), last)
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.001)


@pytest.mark.sample(1)
@SIGNALS
def test_signal_stops_a_run_with_complete_files(number, code, tmp_path):
    with in_background(LONG, tmp_path / "out") as (process, wait_for):
        wait_for("step      16/1000000")
        process.send_signal(number)
        pester(process, number, tmp_path / "stderr", "stopped after step")
        assert process.returncode == code
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no process is left
    ended = Run(code, "", (tmp_path / "stderr").read_text("utf-8"), tmp_path / "out")
    assert 16 <= ended.summary["steps"] < 1_000_000
    assert ended.summary["steps"] == ended.lines[-1]["step"]
    assert set(ended.summary) >= SUMMARY
    assert ended.config["settings"]["steps"] == 1_000_000
    assert f"stopped after step {ended.summary['steps']}" in ended.stderr


MANY = "--algos sync_sgd --seeds 3 --steps 10000 --eval-every 5000"
ENDS = {  # flags, what is said before a first signal, what comes last, the exit code
    "run": (LONG, "step      16/", "stopped after step", None),
    "run --processes 2": (LONG, "step      16/", "stopped after step", None),
    "compare": (MANY, "run 1/3", "stopped after", None),
    "run --steps 16": ("", "", "  files  ", 0),
    "compare --algos sync_sgd": ("--seeds 1 --steps 8", "", "report.html", 0),
    "aim": ("--target cpu:2", "", "error:", 2),  # it has no --out
}


@pytest.mark.sample(0, slow=2)
@SIGNALS
@pytest.mark.parametrize("end", ENDS)
def test_signals_while_a_command_leaves_change_no_exit_code(
    end, number, code, tmp_path
):
    """As a scheduler sends them that wants its machine back."""
    module, _, first = end.partition(" ")
    flags, begun, last, own = ENDS[end]
    words, module = f"{first} {flags}", f"experiments.{module}"
    with in_background(words, tmp_path / "out", module) as (process, wait_for):
        if begun:
            wait_for(begun)
            process.send_signal(number)
        pester(process, number, tmp_path / "stderr", last)
    assert process.returncode == (code if own is None else own)


def test_an_ignored_hangup_stays_ignored():
    """As nohup has it."""
    received = []
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: received.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert received == [signal.SIGTERM]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["pmap", "vmap"])
def test_second_ctrl_c_ends_a_run_within_a_dispatch(backend, tmp_path):
    lengths = "--steps 100000 --dispatch-steps 100000 --eval-every 100000"
    command = f"{lengths} --batch-size 8 --backend {backend}"
    with in_background(command, tmp_path / "out") as (process, wait_for):
        wait_for("learning rate")
        time.sleep(2)  # it compiles, or trains already
        process.send_signal(signal.SIGINT)
        time.sleep(1)  # two at the same moment are one to a process
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "metrics.jsonl"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 75, marks=pytest.mark.slow)],
    ids=str,
)
def test_signal_ends_a_compilation_at_once(number, code, tmp_path):
    """Nothing of it would be kept."""
    command = "--task tests.support.tiny_tasks:entangled --workers 2 --backend vmap"
    watched = in_background(command, tmp_path / "out", **COMPILES)
    with watched as (process, wait_for):
        wait_for("Compiling jit(", after="learning rate")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    stderr = (tmp_path / "stderr").read_text("utf-8")
    assert stderr.splitlines()[-1] == "stopped while compiling"
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
def test_signal_while_a_later_program_is_compiled_loses_no_training(tmp_path):
    """At the start that of the first dispatch, of two steps, is compiled."""
    lengths = "--steps 10 --dispatch-steps 4 --eval-every 5 --lr 1e-9"
    command = f"--task tests.support.tiny_tasks:entangled --workers 2 {lengths}"
    watched = in_background(command, tmp_path / "out", **COMPILES)

    indices = "ShapedArray(int32[3,2,1,4])"  # of the second dispatch's steps
    with watched as (process, wait_for):
        wait_for(indices, after="learning rate")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 75
    stderr = (tmp_path / "stderr").read_text("utf-8")
    assert "stopping after this dispatch" in stderr
    assert Run(75, "", "", tmp_path / "out").summary["steps"] == 5


@pytest.mark.sample(3)
@SIGNALS
@pytest.mark.parametrize(
    "module, task",
    [
        ("experiments.run", "tests.cli.endless:task"),
        ("experiments.run", "tests.support.tiny_tasks:endless"),
        ("experiments.compare", "tests.support.tiny_tasks:endless"),
    ],
)
def test_signal_ends_a_program_that_has_not_begun(module, task, number, code, tmp_path):
    """While it imports a user's module, or reads the data."""
    command = f"--task {task}"
    with in_background(command, tmp_path / "out", module) as (process, wait_for):
        wait_for("waiting in")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    stderr = (tmp_path / "stderr").read_text("utf-8")
    assert stderr.splitlines()[-1] == "stopped before training began"
    assert not (tmp_path / "out").exists()
