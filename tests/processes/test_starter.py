"""A command starts processes, watches and restarts them; in the end none is left."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.commands import ROOT, find_imports, until
from support.faults import is_halted, tagged
from support.kills import in_training
from support.resumed_runs import run

from experiments.processes import starter
from experiments.processes.starter import VARIABLE, verdict, watch
from experiments.training.config import parse

HANG = "exec sleep 1000"


def programs(*scripts):
    """Starts shell scripts as the processes of a run."""
    words = [["sh", "-c", script] for script in scripts]
    return [subprocess.Popen(x, start_new_session=True) for x in words]


def are_gone(pids):
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_command_that_starts_processes_does_not_import_jax():
    names = find_imports("import experiments.processes.group")
    assert "experiments.processes.starter" in names and "jax" not in names


# Processes that train nothing


def test_killed_process_is_named_at_once_and_ends_all(capfd):
    children = programs(HANG, "kill -9 $$")
    start_time = time.monotonic()
    assert watch(children, []) == 75
    assert time.monotonic() - start_time < 5
    line = f"process 1 (pid {children[1].pid}) was killed by SIGKILL\n"
    assert capfd.readouterr().err == line
    assert children[0].returncode == -signal.SIGKILL


def test_process_that_stays_when_the_others_end_is_named(capfd, monkeypatch):
    monkeypatch.setattr(starter, "GRACE", 0.5)
    children = programs(HANG, "kill -ABRT $$", "exit 75")
    assert watch(children, []) == 75
    line = f"process 0 (pid {children[0].pid}) did not end by itself after the others"
    assert capfd.readouterr().err == f"{line}: it may be stopped or frozen\n"


@pytest.mark.slow
def test_process_that_is_done_waits_for_one_that_writes(capfd, monkeypatch):
    monkeypatch.setattr(starter, "GRACE", 0.2)
    assert watch(programs("exit 0", "sleep 1"), []) == 0
    assert watch(programs("sleep 1; exit 3", "exit 3"), []) == 3
    assert capfd.readouterr().err == ""


@pytest.mark.slow
def test_refusal_of_one_process_gives_the_others_time_to_say_why(capfd, tmp_path):
    mark_path = tmp_path / "said"
    assert watch(programs(f"sleep 1; touch {mark_path}; exit 2", "exit 2"), []) == 2
    assert mark_path.exists() and capfd.readouterr().err == ""


@pytest.mark.slow
def test_what_a_lost_process_started_goes_with_it(tmp_path):
    helper = f"sleep 1000 & echo $! > {tmp_path}/pid; kill -9 $$"
    assert watch(programs(HANG, helper), []) == 75
    pid = int((tmp_path / "pid").read_text())
    until(lambda: are_gone([pid]), "the helper ends")


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_signals_stop_all_in_order_and_a_second_one_at_once(
    number, code, tmp_path, capfd
):
    saving = f"trap 'touch {tmp_path}/saved; exit 75' TERM; touch {tmp_path}/begun; "
    children = programs(f"{saving} while :; do sleep 0.1; done", HANG)
    until((tmp_path / "begun").exists, "it handles the signal")
    assert watch(children, [number]) == code
    assert (tmp_path / "saved").exists()
    deaf = programs(f"trap '' TERM; touch {tmp_path}/deaf; {HANG}", "kill -STOP $$")
    until((tmp_path / "deaf").exists, "it ignores the signal")
    until(lambda: is_halted(deaf[1].pid), "it is stopped")
    start_time = time.monotonic()
    assert watch(deaf, [number, number]) == code
    assert time.monotonic() - start_time < 5
    assert [child.returncode for child in deaf] == [-signal.SIGKILL] * 2
    assert capfd.readouterr().err == ""


FROZEN = "did not end by itself after the others: it may be stopped or frozen"
FIRST_KILLED = "process 0 (pid 70) was killed by SIGKILL"
SECOND_KILLED = "process 1 (pid 71) was killed by SIGKILL"
FIRST_ABORTED = "process 0 (pid 70) was killed by SIGABRT"
TERM = signal.SIGTERM
INT = signal.SIGINT


@pytest.mark.parametrize(
    "codes, signal_number, expected",
    [
        ((0, 0), 0, (0, [])),
        ((0, 0), TERM, (0, [])),  # the signal came too late
        ((3, 3), 0, (3, [])),
        ((75, 75), TERM, (75, [])),
        ((75, 75), INT, (130, [])),
        ((-15, 75), INT, (130, [])),  # it was only being started
        ((130, 130), 0, (130, [])),  # someone else stopped them
        ((75, 75), 0, (75, [])),
        ((2, None), 0, (2, [])),
        ((1, 75), 0, (1, [])),
        ((4, None), 0, (4, [])),
        ((None, -9), 0, (75, [SECOND_KILLED])),
        ((1, -9), 0, (75, [SECOND_KILLED])),  # the loss brought about an error
        ((-9, 75), INT, (130, [FIRST_KILLED])),
        ((-6, None, 75), 0, (75, [f"process 1 (pid 71) {FROZEN}"])),
        ((-6, 75), 0, (75, [FIRST_ABORTED])),
    ],
)
def test_exit_code_and_who_is_named(codes, signal_number, expected):
    pids = range(70, 70 + len(codes))
    assert verdict(codes, pids, signal_number) == expected


def test_restart_resumes_in_the_folder_of_the_first_attempt(
    tmp_path, monkeypatch, capfd
):
    program = tmp_path / "program"
    log = tmp_path / "log"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {log}\n'
        'case "$*" in *--resume*) exit 0;; *--process-id\\ 1) kill -9 $$;; esac\n'
        "exec sleep 1000\n"
    )
    program.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(program))
    argv = shlex.split("--algo bmuf --overwrite --processes=2 --max_restarts 2")
    assert starter.start_processes(parse(argv), argv) == 0
    assert capfd.readouterr().err.endswith("SIGKILL\nrestart 1 of 2\n")
    words = r"-m experiments\.run --algo bmuf( --overwrite)? --out (\S+)( --resume)? "
    words += r"--coordinator 127\.0\.0\.1:\d+ --num-processes 2 --process-id \d"
    *earlier_starts, a, b = (
        re.fullmatch(words, x) for x in log.read_text().splitlines()
    )
    assert earlier_starts and all(x and x[1] and not x[3] for x in earlier_starts)
    assert a and b and not a[1] and a[3] and a[0] != b[0]
    assert {x and x[2] for x in (*earlier_starts, a, b)} == {a[2]}


@pytest.mark.parametrize(
    ("restarts", "grows", "code"), [(1, "", 1), (2, "checkpoints/step-$$", 75)]
)
def test_what_repeats_at_the_same_step_ends_the_run(
    restarts, grows, code, tmp_path, monkeypatch, capfd
):
    program = tmp_path / "program"
    out = tmp_path / "out"
    (out / "checkpoints").mkdir(parents=True)
    program.write_text(f"#!/bin/sh\ntouch {out}/{grows}\nexit 75\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    argv = shlex.split(f"--algo bmuf --processes 2 --max-restarts 2 --out {out}")
    assert starter.start_processes(parse(argv), argv) == code
    restart_lines = [f"restart {i + 1} of 2" for i in range(restarts)]
    ends = ["it ended at the same step as before: no restart"] if code == 1 else []
    assert capfd.readouterr().err.splitlines() == restart_lines + ends


@pytest.mark.slow
def test_process_ends_with_its_starter_and_so_does_what_it_started(tmp_path):
    program = "import subprocess, threading; "
    program += "from experiments.processes import starter; "
    program += "assert starter.find_starter_argv() == ['--algo', 'bmuf']; "
    program += f"pid = subprocess.Popen({shlex.split(HANG)[1:]}).pid; "
    program += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(pid)); "
    program += "threading.Event().wait()"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, VARIABLE: json.dumps(["--algo", "bmuf"])},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    pid_path = tmp_path / "pid"
    pid = int(until(lambda: pid_path.exists() and pid_path.read_text(), "its pid"))
    time.sleep(0.5)
    assert child.poll() is None and not are_gone([pid])
    child.communicate(timeout=10)  # closes its stdin
    until(lambda: are_gone([pid]), "what it started ends")


# Runs

RUN = (
    "--task support.tiny_tasks:drawing --workers 2 --optimizer adam "
    "--algo bmuf --period 4 "
)
RUN += "--steps 200 --eval-every 100 --checkpoint-every 20"
LONG = f"{RUN} --steps 400000 --eval-every 400000 --processes 2"


@pytest.mark.slow
def test_two_processes_of_which_one_is_lost_end_as_one_process_does(start, tmp_path):
    command = start(f"{RUN} --processes 2 --max-restarts 1")
    in_training(command)
    pid = command.member(1)
    os.kill(pid, signal.SIGKILL)
    alone = run(RUN, tmp_path / "alone")
    ended = command.ended().with_code(0)
    message = f"process 1 (pid {pid}) was killed by SIGKILL\nrestart 1 of 1\n"
    assert message in ended.stderr
    assert len(ended.summary["resumed_at"]) == 1
    assert ended.summary["processes"] == 2
    assert ended.summary["params_sha256"] == alone.summary["params_sha256"]
    assert ended.config["command"][-6:-2] == ["--processes", "2", "--max-restarts", "1"]


@pytest.mark.slow
def test_processes_end_when_their_command_is_killed(start):
    command = start(LONG)
    in_training(command)
    command.kill()
    until(lambda: not tagged(command.tag), "no process is left", limit=10)


@pytest.mark.long
def test_stopped_process_ends_the_run_and_is_named(start):
    command = start(LONG)
    in_training(command)
    pid = command.member(0)
    os.kill(pid, signal.SIGSTOP)
    ended = command.ended(60)
    assert ended.code == 75
    assert ended.stderr.splitlines()[-1] == f"process 0 (pid {pid}) {FROZEN}"


@pytest.mark.long
def test_port_that_another_program_takes_is_tried_again(start):
    command = start(f"{RUN} --processes 2")
    words = Path(f"/proc/{command.member(0)}/cmdline").read_text()
    [port] = re.findall(r"127\.0\.0\.1:(\d+)", words)
    with socket.create_server(("127.0.0.1", int(port))):
        command.wait_for(f"another program took port {port}: trying another port")
        ended = command.ended().with_code(0)
    assert "cannot listen on port" in ended.stderr
