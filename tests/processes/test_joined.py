"""Processes that are started one by one, and that jax.distributed alone connects."""

import os
import re
import signal
import time
from pathlib import Path

import pytest
from support.commands import PROGRAM, ROOT, free_address, together
from support.faults import by_hand, is_halted, until
from support.kills import in_training

from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import find_steps
from experiments.processes.network import address, reach

RUN = (
    "--task support.tiny_tasks:drawing --workers 4 --optimizer adam "
    "--algo bmuf --period 4 "
)
RUN += "--steps 400000 --eval-every 400000 --checkpoint-every 1000"


# By jax, which ends the process itself: 134 in a shell.
ABORTED = -signal.SIGABRT


def refused(command):
    """The only line of a command that did not find the others."""
    ended = command.ended(60).with_code(4)
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    return line


# Processes that do not find each other


@pytest.mark.slow
def test_nobody_at_the_address_is_told(start):
    coordinator = free_address()
    line = refused(start(f"{by_hand(coordinator, 1, RUN)} --init-timeout 1"))
    assert line.startswith(
        f"process 1 could not reach process 0 at {coordinator} in 1 s ("
    )


@pytest.mark.long
def test_those_that_came_say_that_others_are_missing(start):
    coordinator = free_address()
    words = [by_hand(coordinator, i, RUN, count=4) for i in (0, 1)]
    came = [start(f"{command_words} --init-timeout 4") for command_words in words]
    line = (
        f"waited 4 s (--init-timeout) at {coordinator}, "
        "but not all 4 processes connected"
    )
    lines = [refused(command) for command in came]
    assert lines == [f"process {i} {line}" for i in (0, 1)]


@pytest.mark.slow
def test_processes_that_differ_end_with_one_line_each(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "found = m.version\n"
        "m.version = lambda name: '9.9' if name == 'optax' else found(name)\n"
    )
    coordinator = free_address()
    words = "--workers 4 --steps 16"
    first_command = start(by_hand(coordinator, 0, words))
    second_command = [*PROGRAM, *by_hand(coordinator, 1, f"{words} --seed 1").split()]
    environ = {"JAX_NUM_CPU_DEVICES": 1, "PYTHONPATH": tmp_path}
    [(code, _, errors)] = together([(second_command, environ)])
    line = refused(first_command)
    message = (
        r"process 1 has --seed 1, optax 9\.9, but process 0 has --seed 0, optax \S+"
    )
    assert re.fullmatch(message, line)
    assert (code, errors.strip()) == (4, line)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, thread",
    [
        pytest.param(signal.SIGINT, 130, 0, marks=pytest.mark.long),
        (signal.SIGTERM, 75, -1),  # which does not wake the main thread
    ],
    ids=str,
)
def test_signal_while_it_waits_for_others_ends_it_at_once(number, code, thread, start):
    coordinator = free_address()
    command = start(by_hand(coordinator, 0, RUN))
    assert reach(*address(coordinator), 60) is None
    # The kernel gives a signal to the thread that the id names.
    threads = sorted(int(x.name) for x in Path(f"/proc/{command.pid}/task").iterdir())
    os.kill(threads[thread], number)
    assert command.ended(10).code == code


# Runs


@pytest.fixture
def two_commands(start):
    """Two commands that train together."""
    coordinator = free_address()
    two_commands = [start(by_hand(coordinator, i, RUN)) for i in (0, 1)]
    in_training(two_commands[0], 1000)
    return two_commands


def halt(command):
    """Stops a command, for which others wait from now on."""
    command.kill(signal.SIGSTOP)
    until(lambda: is_halted(command.pid), "it is stopped")


@pytest.mark.long
@pytest.mark.parametrize(
    "number, code, signalled",
    [(signal.SIGTERM, 75, 1), (signal.SIGINT, 130, 0)],
    ids=str,
)
def test_signal_to_any_saves_everywhere(number, code, signalled, two_commands):
    two_commands[signalled].kill(number)
    first_run, second_run = (command.ended() for command in two_commands)
    assert (first_run.code, second_run.code) == (code, code), first_run.stderr
    assert first_run.summary["stopped"] is True
    assert find_steps(first_run.out / FOLDER)[0] == first_run.summary["steps"]
    assert second_run.stdout == ""
    assert "Gloo" not in first_run.stdout


@pytest.mark.long
def test_second_signal_ends_a_process_that_waits_for_another(two_commands):
    halt(two_commands[1])
    time.sleep(1)  # process 0 waits for it
    two_commands[0].kill(signal.SIGINT)
    time.sleep(1)  # two at the same moment are one to a process
    assert two_commands[0].process.poll() is None
    two_commands[0].kill(signal.SIGINT)
    assert two_commands[0].process.wait(10) == 130
    two_commands[1].kill(signal.SIGCONT)
    assert two_commands[1].ended(60).code in (75, ABORTED)


@pytest.mark.long
def test_process_that_stays_stopped_is_lost(two_commands):
    first_command, second_command = two_commands
    halt(second_command)
    ended = first_command.ended(60)
    assert ended.code == ABORTED
    assert "JAX distributed service detected fatal errors" in ended.stderr
    second_command.kill(signal.SIGCONT)
    assert second_command.ended(60).code in (75, ABORTED)


@pytest.mark.slow
def test_process_0_chooses_the_folder_for_those_that_say_none(tmp_path):
    coordinator = free_address()
    words = "--workers 4 --steps 16 --checkpoint-every 16"
    environ = {"JAX_NUM_CPU_DEVICES": 1, "PYTHONPATH": ROOT}
    two_commands = [
        ([*PROGRAM, *by_hand(coordinator, i, words).split()], environ) for i in (0, 1)
    ]
    assert [code for code, *_ in together(two_commands, cwd=tmp_path)] == [0, 0]
    [out] = (tmp_path / "runs").iterdir()
    assert sorted(x.name for x in (out / FOLDER).iterdir()) == [
        f"step-00000016.{i}-of-2.npz" for i in (0, 1)
    ]
