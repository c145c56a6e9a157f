"""Runs on a Dask cluster that lose a process, a worker, the scheduler or the command.

Whatever is lost, no process of a run is left on any worker: `cluster` looks for them.
"""

import os
import re
import signal
import socket
import sys
import time

import pytest
from commands import ROOT
from dask_cluster import RUN, cluster, undisturbed
from faults import until
from kills import attack_clusters, newest
from lasting import assert_same_end

from experiments.launch.supervisor.child import Child, Remote
from experiments.launch.supervisor.limits import Limits

HOST = re.escape(socket.gethostname())
MISSING = "waiting for Dask workers: 1 of 2 missing"
ENDLESS = RUN.replace("--steps 60", "--steps 1000000") + " --keep-checkpoints 1"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The same run on this machine, which nothing befalls."""
    return undisturbed(tmp_path_factory.mktemp("whole") / "out")


def trains(command, step=3):
    """Waits until a command's processes have trained and saved."""
    until(lambda: newest(command.run_out) >= step, f"step {step} of {command.said}")


def lines(ended):
    """The lines on stderr that are about processes and workers."""
    about = "(the )?(process|waiting|restart|Dask)"
    return [x for x in ended.stderr.splitlines() if re.match(about, x)]


WAITS = """
import threading
from experiments.launch.supervisor.child_side import join_supervisor
member = join_supervisor()
print("started", flush=True)
member.report("train", 1)
threading.Event().wait()
"""


def test_process_ends_when_its_lease_is_not_renewed():
    shown = []
    given = {"process": 0, "announced": {}}
    remote = Remote(str(ROOT), shown.append, lease=2.0)
    child = Child([sys.executable, "-c", WAITS], given, shown.append, remote)
    try:
        for _ in range(25):  # longer than the lease
            child.poll(time.monotonic(), Limits())
            time.sleep(0.1)
        assert child.status.code is None and shown == ["started"]
        until(lambda: is_zombie(child.status.pid), "it ends", limit=20)
        # Its first thread may have ended before the others.
        until(lambda: polled(child).is_over, "its threads end", limit=20)
        assert child.status.code == -signal.SIGKILL
    finally:
        child.kill()
        child.reap()


def test_process_has_its_hosts_modules_and_variables_then_the_commands(
    monkeypatch, tmp_path
):
    (tmp_path / "only_there.py").write_text("x = 'found'\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")  # of `python -m dask worker`
    monkeypatch.setenv("OF_BOTH", "host")
    shown, theirs = [], {"OF_BOTH": "command", "OF_COMMAND": "command"}
    code = "import os, only_there; print(only_there.x, *map(os.environ.get, "
    words = [sys.executable, "-P", "-c", f"{code}{[*theirs]}))"]
    remote = Remote(str(ROOT), shown.append, 20.0, theirs)
    child = Child(words, {"process": 0, "announced": {}}, shown.append, remote)
    until(lambda: polled(child).is_over, "it ends")
    assert shown == ["found host command"]


@pytest.mark.long
def test_killed_process_is_named_and_restarted(whole, tmp_path):
    with cluster(tmp_path, workers=2) as dask:
        command = dask.run(f"{RUN} --max-restarts 1")
        trains(command)
        pid = dask.member(1)
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        command.wait_for("restart 1 of 1")
        assert time.monotonic() - began < 10
        ended = command.ended()
    assert_same_end(ended, whole)
    [lost, restart] = lines(ended)
    place = r'(in "\w+" )?at step \d+'
    named = rf"process 1 \(pid {pid} on {HOST}\) was killed by SIGKILL {place}"
    assert re.fullmatch(named, lost)
    assert restart == "restart 1 of 1"


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(1, marks=pytest.mark.long),
    ],
)
def test_spare_takes_the_place_of_a_killed_worker(number, whole, tmp_path):
    with cluster(tmp_path, workers=3) as dask:
        command = dask.run(f"{RUN} --max-restarts 1")
        trains(command)
        lost = dask.worker_of(dask.member(number))
        stays = dask.worker_of(dask.member(1 - number))
        lost.kill()
        command.wait_for("restart 1 of 1")
        until(lambda: number in dask.members(), "it starts again")
        assert dask.worker_of(dask.member(1 - number)) is stays
        assert dask.worker_of(dask.member(number)) not in (lost, stays)
        ended = command.ended()
    assert_same_end(ended, whole)
    left = rf"process {number}'s host {HOST} is gone \(its Dask worker tcp://\S+ left\)"
    assert re.fullmatch(left, lines(ended)[0])


@pytest.mark.long
def test_run_waits_for_a_worker_where_there_is_no_spare(whole, tmp_path):
    with cluster(tmp_path, workers=1) as dask:
        command = dask.run(f"{RUN} --max-restarts 1")
        command.wait_for(MISSING)
        dask.worker()
        trains(command)
        dask.workers[0].kill()
        command.wait_for(f"(?s)restart 1 of 1\n.*{MISSING}")
        dask.worker()
        ended = command.ended()
    assert_same_end(ended, whole)


@pytest.mark.long
def test_frozen_worker_counts_as_lost(whole, tmp_path):
    with cluster(tmp_path, workers=3) as dask:
        command = dask.run(f"{RUN} --max-restarts 1")
        trains(command)
        pid = dask.member(0)
        frozen = dask.worker_of(pid)
        frozen.kill(signal.SIGSTOP)
        command.wait_for("restart 1 of 1")
        # Two processes 0 would write the same files.
        assert not os.path.exists(f"/proc/{pid}/environ") or is_zombie(pid)
        ended = command.ended()
        frozen.kill(signal.SIGCONT)
    assert_same_end(ended, whole)
    assert re.search("process 0's host .* is gone", ended.stderr)


def polled(child):
    child.poll(time.monotonic(), Limits())
    return child


def is_zombie(pid):
    """Whether a process has ended, and its parent has not asked for its code."""
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.long
@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_signal_to_the_command_saves_and_stops(number, code, tmp_path):
    with cluster(tmp_path, workers=2) as dask:
        command = dask.run(ENDLESS)
        trains(command)
        command.kill(number)
        ended = command.ended()
        assert ended.code == code
        assert ended.summary["stopped"]
        assert newest(ended.out) == ended.summary["steps"]
        assert f"stopped after step {ended.summary['steps']}" in ended.stderr


@pytest.mark.slow
def test_processes_end_with_the_command(tmp_path):
    with cluster(tmp_path, workers=2) as dask:
        command = dask.run(f"{ENDLESS} --max-restarts 3")
        trains(command)
        command.kill()
        until(lambda: not dask.members(), "the processes end", limit=20)


@pytest.mark.long
@pytest.mark.parametrize(
    "number, line",
    [
        (signal.SIGKILL, "is lost"),
        (signal.SIGSTOP, "gave no sign of life for 20 s"),
    ],
)
def test_processes_end_with_the_scheduler(number, line, tmp_path):
    with cluster(tmp_path, workers=2) as dask:
        command = dask.run(f"{ENDLESS} --max-restarts 3")
        trains(command)
        dask.scheduler.kill(number)
        until(lambda: not dask.members(), "the processes end", limit=40)
        ended = command.ended()
    assert ended.code == 75
    assert f"the Dask scheduler {dask.address} {line}" in ended.stderr.splitlines()
    assert "Traceback" not in ended.stderr


@pytest.mark.long
def test_two_commands_take_turns_on_one_cluster(tmp_path):
    with cluster(tmp_path, workers=2) as dask:
        first = dask.run(ENDLESS)
        trains(first)
        (tmp_path / "other").mkdir()
        second = dask.run(RUN, tmp_path / "other" / "out")
        second.wait_for("waiting for Dask workers: 2 of 2 missing")
        first.kill(signal.SIGTERM)
        assert first.ended().code == 75
        assert second.ended().code == 0


@pytest.mark.long
def test_runs_with_kills_at_random_moments_end_as_if_nothing_had_been(tmp_path):
    assert attack_clusters(10, seed=0, folder=tmp_path) == 0
