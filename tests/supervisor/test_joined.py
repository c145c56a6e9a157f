"""Processes that are started one by one, and that jax.distributed alone connects."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from commands import PROGRAM, ROOT, free_address, together
from faults import commands, is_halted, until

from experiments.checkpoint.folder import steps
from experiments.checkpoint.manager import FOLDER
from experiments.launch.addresses import address, reach

RUN = "--task tiny_tasks:drawing --workers 4 --optimizer adam --algo bmuf --period 4 "
RUN += "--steps 400000 --eval-every 400000 --checkpoint-every 1000"


@pytest.fixture
def start(tmp_path):
    with commands(tmp_path) as start:
        yield start


def by_hand(at, number, words=RUN, count=2):
    return f"{words} --coordinator {at} --num-processes {count} --process-id {number}"


# By jax, which ends the process itself: 134 in a shell.
ABORTED = -signal.SIGABRT


def refused(command):
    """The only line of a command that did not find the others."""
    ended = command.ended(60)
    assert ended.code == 4, ended.stderr
    assert ended.stdout == ""
    [line] = ended.stderr.splitlines()
    return line


# Processes that do not find each other


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid", "a..b"])
def test_nobody_at_the_address_is_told(host, start):
    at = free_address().replace("127.0.0.1", host)
    line = refused(start(f"{by_hand(at, 1)} --init-timeout 1"))
    assert line.startswith(f"process 1 could not reach process 0 at {at} in 1 s (")
    assert line.endswith("process 0 runs, and that this is its address (--coordinator)")


@pytest.mark.slow
def test_those_that_came_say_that_others_are_missing(start):
    at = free_address()
    words = [by_hand(at, i, count=4) for i in (0, 1)]
    came = [start(f"{each} --init-timeout 4") for each in words]
    line = f"waited 4 s (--init-timeout) at {at}, but not all 4 processes connected"
    lines = [refused(command) for command in came]
    assert lines == [f"process {i} {line}" for i in (0, 1)]


def test_port_in_use_is_told_at_once(start):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        line = refused(start(by_hand(f"127.0.0.1:{port}", 0)))
    assert line == f"process 0 cannot listen on port {port}: Address already in use"


def test_address_of_another_machine_is_refused(start):
    line = refused(start(by_hand("203.0.113.7:9999", 0)))  # kept for documents
    assert line == (
        "process 0 cannot listen at 203.0.113.7, which is not an address of this "
        "machine: set --coordinator to an address of this machine"
    )


@pytest.mark.slow
def test_something_else_at_the_address_is_told(start):
    with socket.create_server(("127.0.0.1", 0)) as server:
        at = f"127.0.0.1:{server.getsockname()[1]}"
        line = refused(start(f"{by_hand(at, 1)} --init-timeout 2"))
    line = line.removeprefix(f"process 1 waited 2 s (--init-timeout) at {at}, but ")
    assert line == "not all 2 processes connected"


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [(2,), (1, 1)], ids=["unknown", "twice"])
def test_process_that_is_one_too_many_is_aborted_by_jax(numbers, start):
    at, six = free_address(), RUN.replace("workers 4", "workers 6")
    first = start(by_hand(at, 0) if len(numbers) == 1 else by_hand(at, 0, six, 3))
    assert reach(*address(at), 100) is None
    others = [start(by_hand(at, i, six, 3)) for i in numbers]

    def aborted():
        return [x.said for x in others if x.process.poll() == ABORTED]

    [told, *_] = until(aborted, "jax aborts it", limit=100)
    assert "Unexpected task registered" in told or "RegisterTask" in told
    for command in (first, *others):
        command.process.kill()


@pytest.mark.slow
def test_other_version_is_told(start, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\n"
        "found = m.version\n"
        "m.version = lambda name: '9.9' if name == 'optax' else found(name)\n"
    )
    at, words = free_address(), "--workers 4 --steps 16"
    first = start(by_hand(at, 0, words))
    second = [*PROGRAM, *by_hand(at, 1, words).split()]
    environ = {"JAX_NUM_CPU_DEVICES": 1, "PYTHONPATH": tmp_path}
    [(code, _, errors)] = together([(second, environ)])
    line = refused(first)
    assert re.fullmatch(r"process 1 has optax 9\.9, but process 0 has optax \S+", line)
    assert (code, errors.strip()) == (4, line)


def test_restarts_are_left_to_who_started_the_processes(start):
    ended = start(f"{by_hand(free_address(), 0)} --max-restarts 1").ended()
    assert ended.code == 2
    assert "their scheduler may restart them" in ended.stderr


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_signal_while_it_waits_for_others_ends_it_at_once(number, code, start):
    at = free_address()
    command = start(by_hand(at, 0))
    assert reach(*address(at), 60) is None
    command.kill(number)
    assert command.ended(10).code == code


def test_signal_that_does_not_wake_the_main_thread_ends_it_too(start):
    at = free_address()
    command = start(by_hand(at, 0))
    assert reach(*address(at), 60) is None
    # The kernel gives a signal to the thread that the id names.
    _, *others = (int(x.name) for x in Path(f"/proc/{command.pid}/task").iterdir())
    os.kill(others[-1], signal.SIGTERM)
    assert command.ended(10).code == 75


# Runs


def in_training(command):
    until(lambda: steps(command.run_out / FOLDER), "a checkpoint")


@pytest.mark.long
@pytest.mark.parametrize("asked", [0, 1])
@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_signal_to_any_saves_everywhere(number, code, asked, start):
    at = free_address()
    both = [start(by_hand(at, i)) for i in (0, 1)]
    in_training(both[0])
    both[asked].kill(number)
    first, second = (command.ended() for command in both)
    assert (first.code, second.code) == (code, code), first.stderr
    step = first.summary["steps"]
    assert first.summary["stopped"] is True
    assert steps(first.out / FOLDER)[0] == step
    assert second.stdout == ""
    assert "Gloo" not in first.stdout


@pytest.mark.long
def test_second_signal_ends_a_process_that_waits_for_another(start):
    at = free_address()
    both = [start(by_hand(at, i)) for i in (0, 1)]
    in_training(both[0])
    both[1].kill(signal.SIGSTOP)
    until(lambda: is_halted(both[1].pid), "it is stopped")
    time.sleep(1)  # process 0 waits for it
    both[0].kill(signal.SIGINT)
    time.sleep(1)  # two at the same moment are one to a process
    assert both[0].process.poll() is None
    both[0].kill(signal.SIGINT)
    assert both[0].process.wait(10) == 130
    both[1].kill(signal.SIGCONT)
    assert both[1].ended(60).code in (75, ABORTED)


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1])
def test_process_that_stays_stopped_is_lost(number, start):
    at = free_address()
    both = [start(by_hand(at, i)) for i in (0, 1)]
    in_training(both[0])
    both[number].kill(signal.SIGSTOP)
    until(lambda: is_halted(both[number].pid), "it is stopped")
    ended = both[1 - number].ended(60)
    assert ended.code == ABORTED
    assert "JAX distributed service detected fatal errors" in ended.stderr
    both[number].kill(signal.SIGCONT)
    assert both[number].ended(60).code in (75, ABORTED)


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("when, code", [("read", 75), ("init", 2)])
def test_task_that_fails_on_one_process_ends_all_alike(when, code, start):
    at, words = free_address(), RUN.replace("drawing", f"failing --when {when}")
    both = [start(by_hand(at, i, words)) for i in (0, 1)]
    first, second = (command.ended(60) for command in both)
    assert (first.code, second.code) == (code, code), first.stderr
    what = "the disk is on fire" if when == "read" else f"no {when} here"
    told = first.stderr.splitlines()[-1]
    assert told.startswith("process 1: ") and what in told
    assert what in second.stderr
    assert first.stdout == ""


@pytest.mark.slow
def test_process_0_chooses_the_folder_for_those_that_say_none(tmp_path):
    at, words = free_address(), "--workers 4 --steps 16 --checkpoint-every 16"
    environ = {"JAX_NUM_CPU_DEVICES": 1, "PYTHONPATH": ROOT}
    both = [([*PROGRAM, *by_hand(at, i, words).split()], environ) for i in (0, 1)]
    assert [code for code, *_ in together(both, cwd=tmp_path)] == [0, 0]
    [out] = (tmp_path / "runs").iterdir()
    assert sorted(x.name for x in (out / FOLDER).iterdir()) == [
        f"step-00000016.{i}-of-2.npz" for i in (0, 1)
    ]
