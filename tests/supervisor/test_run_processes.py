"""Processes are started, watched and restarted; in the end none is left."""

import json
import os
import signal
import sys
import time

import pytest
from commands import imported_by
from fake_member import commands, left, pid_of, pids, until

from experiments.launch.supervisor.child import Child
from experiments.launch.supervisor.failure_policy import decide, stuck_lines
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import ProcessStatus, TrackedProcess

STEPS = ["at connect", "at prepare", "steps 3"]
HANG = [*STEPS, "touch trained", "hang"]


@pytest.fixture
def start(tmp_path):
    with commands(tmp_path) as start:
        yield start


def told(folder, process, attempt=0):
    """The attributes that a process received."""
    return json.loads((folder / f"told-{process}-{attempt}").read_text())


def trained(folder, *processes):
    """Waits until processes hang after their steps."""
    files = [folder / f"trained-{i}" for i in processes]
    until(lambda: all(file.exists() for file in files), "they train")


def test_processes_are_told_what_they_need(start, tmp_path):
    plan = {"*": ["told", *STEPS]}
    assert start(plan, count=3, announced={"out": "runs/1"}).ended() == (0, [])
    for i in range(3):
        known = told(tmp_path, i)
        host, port = known.pop("jax_coordinator").split(":")
        assert host == "127.0.0.1" and int(port) > 0
        assert known == {
            "process": i,
            "processes": 3,
            "local": i,
            "locals": 3,
            "hosts": 1,
            "attempt": 0,
            "init_timeout": 60.0,
            "announced": {"out": "runs/1"},
        }


def test_output_is_process_0s_and_errors_tell_whose_they_are(start):
    command = start({"*": ["print out", "warn err", "note a note"]})
    code, lines = command.ended()
    assert code == 0
    assert command.out.read_text() == "out\n"
    assert sorted(lines) == ["[1] err", "a note", "err", "process 1: a note"]


def test_last_words_are_printed_to_their_end(start):
    command = start({"1": ["flood", "refuse 2 no"], "0": ["refuse 2 no"]})
    code, lines = command.ended()
    assert code == 2
    assert lines == [*(f"[1] {i}" for i in range(30_000)), "no"]


def test_process_that_is_done_waits_for_one_that_writes(start, tmp_path):
    command = start({"0": [*STEPS, "wait written"], "1": STEPS})
    until(lambda: len(pids(tmp_path)) == 2 and len(left(tmp_path)) == 1, "1 ends")
    time.sleep(1.5)  # longer than what ends badly is given
    (tmp_path / "written").touch()
    assert command.ended() == (0, [])


def test_lines_of_a_pipe_come_as_they_end_and_one_without_an_end_is_cut():
    program = (
        "import sys, time; sys.stderr.write('a\\n' + 70_000 * 'x'); time.sleep(60)"
    )
    lines = []
    child = Child([sys.executable, "-c", program], {"process": 1}, lines.append)
    until(lambda: child.poll(0.0, Limits()) or len(lines) > 1, "two lines")
    assert lines == ["[1] a", f"[1] {65_536 * 'x'}"]
    assert child.status.code is None
    child.kill()
    child.reap()
    assert child.status.code == -signal.SIGKILL
    assert lines[2:] == [f"[1] {(70_000 - 65_536) * 'x'}"]


def test_supervisor_imports_neither_jax_nor_what_trains():
    names = imported_by("import experiments.launch.supervisor.local_processes as x")
    names |= imported_by("import experiments.launch.supervisor.leader")
    rooms = {name for name in names if name.startswith("experiments.")}
    assert "experiments.exit_codes" in rooms and "jax" not in names
    ours = ("experiments.launch", "experiments.exit_codes")
    assert not {name for name in rooms if not name.startswith(ours)}


# Losses


def test_killed_process_is_named_at_once(start, tmp_path):
    command = start({"*": HANG}, count=3)
    trained(tmp_path, 0, 1, 2)
    pid = pid_of(tmp_path, 1)
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    code, lines = command.ended()
    assert time.monotonic() - began < 3
    assert code == 75
    assert lines == [f"process 1 (pid {pid}) was killed by SIGKILL at step 3"]


def test_what_a_process_started_goes_with_it(start, tmp_path):
    command = start({"0": HANG, "1": ["helper", *HANG]})
    trained(tmp_path, 0, 1)
    os.kill(pid_of(tmp_path, 1), signal.SIGKILL)
    assert command.ended()[0] == 75
    assert 101 in dict(pids(tmp_path))
    until(lambda: not left(tmp_path), "the helper ends")


def test_lost_process_is_restarted(start, tmp_path):
    plan = {"1@0": ["told", *STEPS, "kill 9"], "0@0": HANG, "*": ["told", *STEPS]}
    code, [lost, restart] = start(plan, max_restarts=2).ended()
    assert code == 0
    assert "was killed by SIGKILL at step 3" in lost
    assert restart == "restart 1 of 2"
    assert [told(tmp_path, i, 1)["attempt"] for i in (0, 1)] == [1, 1]
    addresses = [told(tmp_path, 1, attempt)["jax_coordinator"] for attempt in (0, 1)]
    assert addresses[0] != addresses[1]


def test_stopped_process_is_told_and_may_go_on(start, tmp_path):
    command = start({"*": [*HANG[:-1], "wait go"]}, warned_after=1)
    trained(tmp_path, 0, 1)
    pid = pid_of(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    command.wait_for("wait for it")
    os.kill(pid, signal.SIGCONT)
    command.wait_for("again")
    (tmp_path / "go").touch()
    who = f"process 1 (pid {pid})"
    silent = f"{who} is stopped: it has given no sign of life for 1 s"
    assert command.ended() == (
        0,
        [f"{silent}; the others wait for it", f"{who} gives signs of life again"],
    )


def test_process_that_stays_stopped_is_lost(start, tmp_path):
    command = start({"*": HANG}, warned_after=1, lost_after=2)
    trained(tmp_path, 0, 1)
    pid = pid_of(tmp_path, 1)
    os.kill(pid, signal.SIGSTOP)
    code, lines = command.ended()
    assert code == 75
    assert lines[1:] == [
        f"process 1 (pid {pid}) gave no sign of life for 2 s (it was stopped) at step 3"
    ]


def test_process_for_which_others_wait_is_told_once(start, tmp_path):
    slow = ["at prepare", "steps 3", "at evaluate 3", "touch trained", "wait go"]
    plan = {"0": ["at prepare", "steps 5", "touch trained", "wait go"], "1": slow}
    command = start(plan, stuck_after=0.5)
    trained(tmp_path, 0, 1)
    command.wait_for("wait for it")
    time.sleep(1)
    (tmp_path / "go").touch()
    line = 'process 1 has been in "evaluate" at step 3 for 0.5 s'
    assert command.ended() == (0, [f"{line}; the others wait for it in step 5"])


# Ends of one process that end all


def test_refusal_of_one_ends_all(start):
    plan = {"0": HANG, "1": ["at prepare", "refuse 2 --lr must be above 0"]}
    assert start(plan).ended() == (2, ["process 1: --lr must be above 0"])


def test_refusal_of_all_is_told_once(start):
    plan = {"*": ["refuse 2 error: --lr must be above 0"]}
    assert start(plan, count=3).ended() == (2, ["error: --lr must be above 0"])


def test_bug_is_told_and_not_restarted(start, tmp_path):
    plan = {"0": HANG, "1": [*STEPS, "raise a bug"]}
    code, lines = start(plan, max_restarts=3).ended()
    assert code == 1
    assert lines[0] == "[1] Traceback (most recent call last):"
    assert lines[-2] == "[1] RuntimeError: a bug"
    pid = pid_of(tmp_path, 1)
    assert lines[-1] == f"process 1 (pid {pid}) ended with exit code 1 at step 3"


# Who is to blame, by what is known at a time

NOTICED = [
    {"code": 75, "said": "lost", "text": "a collective failed"},
    {"code": 75},
    {"code": -6},
    {"code": -11, "phase": "connect"},
]


def known(process, ended=None, **seen):
    """A process that trains, or that ended at this time."""
    seen = {"phase": "train", "step": 3, **seen}
    status = ProcessStatus(process, 100 + process, **seen)
    return TrackedProcess(status, "", 0.0, ended)


def judged(*members, asked=None, now):
    return decide(members, asked, now, Limits())


def test_the_reason_is_told_though_the_process_that_noticed_it_ended_first():
    noticed = known(
        0, ended=10.0, code=75, said="lost", text="Connection reset by peer"
    )
    burning = known(1, ended=10.4, code=75, said="refused", text="the disk is on fire")
    found = judged(noticed, burning, now=10.5)
    assert found and found.lines == ["process 1: the disk is on fire"]


@pytest.mark.parametrize("noticed", NOTICED, ids=["lost", "75", "SIGABRT", "SIGSEGV"])
def test_who_noticed_is_not_blamed_before_a_second_has_gone(noticed):
    alive, first = known(0), known(1, ended=10.0, **noticed)
    assert judged(alive, first, now=10.9) is None
    late = judged(alive, first, now=11.0)
    assert late is not None and "process 1" in late.lines[0]
    assert noticed.get("text", "") in late.lines[0]
    assert late.kind == ("unconnected" if "phase" in noticed else "lost")
    killed = judged(known(0, ended=10.5, code=-9), first, now=10.5)
    assert killed is not None and killed.kind == "lost"
    assert killed.lines == ["process 0 (pid 100) was killed by SIGKILL at step 3"]
    failed = judged(known(0, ended=10.5, code=1), first, now=10.5)
    assert failed is not None and (failed.kind, failed.code) == ("end", 1)
    assert failed.lines == ["process 0 (pid 100) ended with exit code 1 at step 3"]


@pytest.mark.parametrize("said", ["", "refused"])
def test_exception_that_a_loss_brought_about_is_not_blamed(said):
    first = known(0, ended=10.0, code=1, said=said, text="ValueError: gone")
    assert judged(first, known(1), now=10.5) is None
    late = judged(first, known(1, ended=10.5, code=-9), now=10.5)
    assert late is not None and late.kind == "lost"
    assert late.lines == ["process 1 (pid 101) was killed by SIGKILL at step 3"]
    refused = known(0, ended=10.0, code=2, said="refused", text="no such file")
    ended = judged(refused, known(1, ended=10.5, code=-9), now=10.5)
    assert ended is not None and ended == ("end", 2, ["process 0: no such file"])


def test_loss_while_stopping_is_not_restarted():
    killed, other = known(0, ended=10.0, code=-9), known(1)
    line = "process 0 (pid 100) was killed by SIGKILL at step 3"
    assert judged(killed, other, asked=signal.SIGTERM, now=10.0) == ("end", 75, [line])
    stopped = known(1, said="stopped")
    assert judged(killed, stopped, now=10.0) == ("end", 75, [line])


@pytest.mark.parametrize(
    "phase, step, waited",
    [
        ("train", 3, False),
        ("train", 2, True),
        ("evaluate", 3, True),
        ("prepare", None, True),
        ("evaluate", 4, False),  # it is ahead
    ],
)
def test_others_wait_for_who_is_behind(phase, step, waited):
    lines = stuck_lines([known(0), known(1, phase=phase, step=step)], 30.0, 30.0)
    assert list(lines) == ([(1, phase, step)] if waited else [])
    assert not stuck_lines([known(0), known(1, phase=phase, step=step)], 29.0, 30.0)


def test_others_have_a_second_to_fail_alike():
    said = {"code": 2, "said": "refused", "text": "no such file"}
    first = known(0, ended=10.0, **said)
    assert judged(first, known(1), known(2), now=10.9) is None
    alone = judged(first, known(1), known(2), now=11.0)
    assert alone is not None
    assert (alone.code, alone.lines) == (2, ["process 0: no such file"])
    two = judged(first, known(1), known(2, ended=10.1, **said), now=11.0)
    assert two is not None and two.lines == ["processes 0 and 2: no such file"]


@pytest.mark.parametrize(
    "codes, expected",
    [((0, 0), 0), ((0, 3), 3), ((75, 0), 75), ((130, 130), 130), ((-15, 0), 75)],
    ids=str,
)
def test_code_of_an_orderly_end(codes, expected):
    ended = [known(i, ended=10.0 + i, code=code) for i, code in enumerate(codes)]
    asked = signal.SIGTERM if min(codes) < 0 or max(codes) > 3 else None
    assert judged(*ended, asked=asked, now=11.0) == ("end", expected, [])
    assert judged(*ended, known(2), asked=asked, now=99.0) is None


# jax's own start-up


def test_crash_in_jaxs_start_up_is_tried_on_another_port(start, tmp_path):
    plan = {"1": ["at connect", "once kill 11", "told"], "0": STEPS}
    code, [line, again] = start(plan).ended()
    assert code == 0
    assert "process 1" in line and "SIGSEGV" in line and "127.0.0.1:" in line
    assert again == "trying another port"
    assert told(tmp_path, 1)["attempt"] == 0
    assert told(tmp_path, 1)["jax_coordinator"] not in line


@pytest.mark.slow
def test_jaxs_start_up_is_not_tried_for_ever(start):
    plan = {"0": ["at connect", "hang"], "1": ["at connect", "kill 6"]}
    code, lines = start(plan).ended()
    assert code == 4
    assert lines[1::2] == ["trying another port"] * 2
    assert all("was killed by SIGABRT" in line for line in lines[::2])


@pytest.mark.parametrize(
    "other, expected",
    [
        ("at connect", "processes 0 and 1 could not connect in 1 s: a firewall"),
        ("hang", "process 0 waited 1 s for process 1 to start jax (127.0.0.1:"),
    ],
    ids=["both", "one"],
)
def test_jaxs_start_up_that_hangs_is_given_up(other, expected, start):
    plan = {"0": ["at connect", "hang"], "1": [other, "hang"]}
    code, [line] = start(plan, init_timeout=1).ended()
    assert code == 4 and line.startswith(expected)


# Signals


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_signal_stops_all_in_order(number, code, start, tmp_path):
    command = start({"*": ["stoppable"]}, max_restarts=1)
    trained(tmp_path, 0, 1)
    command.process.send_signal(number)
    assert command.ended() == (code, [])
    assert not left(tmp_path)


@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_second_signal_ends_at_once(number, code, start, tmp_path):
    command = start({"*": ["deaf", *HANG]}, max_restarts=1)
    trained(tmp_path, 0, 1)
    command.process.send_signal(number)
    until((tmp_path / "heard-1").exists, "process 1 is asked to stop")
    assert command.process.poll() is None
    command.process.send_signal(number)
    assert command.ended(3) == (code, [])


@pytest.mark.parametrize("code", [0, 3])
def test_second_signal_after_the_summary_keeps_its_code(code, start, tmp_path):
    ended = ["deaf", *STEPS, f"decided {code}", "touch trained", "hang"]
    command = start({"0": ended, "*": ["deaf", *HANG]})
    trained(tmp_path, 0, 1)
    command.process.send_signal(signal.SIGTERM)
    until((tmp_path / "heard-1").exists, "process 1 is asked to stop")
    command.process.send_signal(signal.SIGTERM)
    assert command.ended(3) == (code, [])


def test_signal_before_the_run_ends_it_at_once(start, tmp_path):
    command = start({"*": ["at connect", "deaf", "touch trained", "hang"]})
    trained(tmp_path, 0, 1)
    command.process.send_signal(signal.SIGINT)
    assert command.ended(3) == (130, [])


# Supervisors that are gone


def test_processes_go_with_their_supervisor(start, tmp_path):
    command = start({"*": ["helper", *HANG]})
    trained(tmp_path, 0, 1)
    assert len(left(tmp_path)) == 4
    command.process.kill()
    until(lambda: not left(tmp_path), "they end")
