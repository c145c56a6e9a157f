"""Signals to a running command, as real processes."""

import os
import re
import signal
import time

import pytest
from support.commands import CACHE, SUMMARY, TIMEOUT, EndedRun, in_background
from support.faults import until

from experiments.command.stopping import handling

LONG = "--steps 1000000 --dispatch-steps 16 --eval-every 16"
BEGUN = "step      16/"
STDERR = "err-background"
STDOUT = "out-background"

# A program that is found among those that were kept is not compiled.
COMPILES = {"JAX_LOG_COMPILES": "1", CACHE: "false"}


def pester(process, number, folder, last_words):
    """Sends a signal all the time from a process's last line to its end."""
    output_paths = folder / STDERR, folder / STDOUT
    until(
        lambda: any(last_words in x.read_text("utf-8") for x in output_paths),
        last_words,
    )
    while process.poll() is None:
        process.send_signal(number)
        time.sleep(0.001)


@pytest.mark.slow
def test_signal_stops_a_run_with_complete_files(tmp_path):
    number = signal.SIGHUP
    with in_background(LONG, tmp_path / "out") as (process, wait_for):
        wait_for(BEGUN)
        process.send_signal(number)
        pester(process, number, tmp_path, "stopped after step")
        assert process.returncode == 75
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)  # no process is left
    ended = EndedRun(75, "", (tmp_path / STDERR).read_text("utf-8"), tmp_path / "out")
    assert 16 <= ended.summary["steps"] < 1_000_000
    assert ended.summary["steps"] == ended.lines[-1]["step"]
    assert set(ended.summary) >= SUMMARY
    assert ended.config["settings"]["steps"] == 1_000_000
    assert f"stopped after step {ended.summary['steps']}" in ended.stderr


MANY = "--algos sync_sgd --seeds 3 --steps 10000 --eval-every 5000"
ENDS = {  # flags, a signal, what is said before a first one, what comes last, the code
    "run --processes 2": (LONG, signal.SIGHUP, BEGUN, "stopped after step", 75),
    "compare": (MANY, signal.SIGTERM, "run 1/3", "stopped after", 75),
    "run --steps 16": ("", signal.SIGTERM, "", "  files  ", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_signals_while_a_command_leaves_change_no_exit_code(end, tmp_path):
    """As a scheduler sends them that wants its machine back."""
    module, _, first_words = end.partition(" ")
    flags, number, start_words, last_words, code = ENDS[end]
    words = f"{first_words} {flags}"
    module = f"experiments.{module}"
    with in_background(words, tmp_path / "out", module) as (process, wait_for):
        if start_words:
            wait_for(start_words)
            process.send_signal(number)
        pester(process, number, tmp_path, last_words)
    assert process.returncode == code
    stderr = (tmp_path / STDERR).read_text("utf-8")
    assert "Traceback" not in stderr
    stopped = re.search(r"stopped after (\d) of 3 runs", stderr)
    if stopped:  # none is half made
        assert len([*tmp_path.rglob("seed-*")]) == int(stopped[1])
        assert not (tmp_path / "out" / "report.html").exists()


def test_an_ignored_hangup_stays_ignored():
    """As nohup has it."""
    received = []
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handling(lambda number, frame: received.append(number)):
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, old_handler)
    assert received == [signal.SIGTERM]


@pytest.mark.slow
def test_second_ctrl_c_ends_a_run_within_a_dispatch(tmp_path):
    lengths = "--steps 100000 --dispatch-steps 100000 --eval-every 100000"
    command = f"{lengths} --batch-size 8"
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
def test_signal_ends_a_compilation_at_once(tmp_path):
    """Nothing of it would be kept."""
    command = "--task tests.support.tiny_tasks:entangled --workers 2 --backend vmap"
    with in_background(command, tmp_path / "out", **COMPILES) as (process, wait_for):
        wait_for("Compiling jit(", earlier_text="learning rate")
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT) == 130
    stderr = (tmp_path / STDERR).read_text("utf-8")
    assert stderr.splitlines()[-1] == "stopped while compiling"
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.slow
def test_signal_while_a_later_program_is_compiled_loses_no_training(tmp_path):
    """At the start that of the first dispatch, of two steps, is compiled."""
    lengths = "--steps 10 --dispatch-steps 4 --eval-every 5 --lr 1e-9"
    command = f"--task tests.support.tiny_tasks:entangled --workers 2 {lengths}"
    indices = "ShapedArray(int32[3,2,1,4])"  # of the second dispatch's steps
    with in_background(command, tmp_path / "out", **COMPILES) as (process, wait_for):
        wait_for(indices, earlier_text="learning rate")
        process.send_signal(signal.SIGTERM)
        assert process.wait(TIMEOUT) == 75
    assert "stopping after this dispatch" in (tmp_path / STDERR).read_text("utf-8")
    assert EndedRun(75, "", "", tmp_path / "out").summary["steps"] == 5


@pytest.mark.parametrize(
    "module, task, number, code",
    [
        ("run", "tests.support.endless_module:task", signal.SIGINT, 130),
        ("run", "tests.support.tiny_tasks:endless", signal.SIGTERM, 75),
        pytest.param(
            *("compare", "tests.support.tiny_tasks:endless", signal.SIGHUP, 75),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_signal_ends_a_program_that_has_not_begun(module, task, number, code, tmp_path):
    """While it imports a user's module, or reads the data."""
    words = f"--task {task}"
    module = f"experiments.{module}"
    with in_background(words, tmp_path / "out", module) as (process, wait_for):
        wait_for("waiting in")
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    stderr = (tmp_path / STDERR).read_text("utf-8")
    assert stderr.splitlines()[-1] == "stopped with nothing to save"
    assert not (tmp_path / "out").exists()
