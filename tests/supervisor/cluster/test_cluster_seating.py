"""Admission and places of workers, with a cluster that is played here."""

import platform
import signal
import subprocess
import sys
import threading
from importlib import metadata
from types import SimpleNamespace

import pytest
from commands import environment
from distributed.protocol.pickle import dumps, loads
from faults import until

from experiments.launch.cluster import (
    cluster_processes,
    inspection,
    member,
    workers,
)
from experiments.launch.cluster.cluster_processes import ClusterProcesses
from experiments.launch.cluster.member import run_member
from experiments.launch.cluster.seating import Seating
from experiments.launch.cluster.workers import Expected, Roster, Seat, expected
from experiments.launch.supervisor.limits import Limits
from experiments.launch.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    end_line,
)
from experiments.training.config import parse

MEANT = Expected({}, {"experiments": "0"})
FACTS = Seat("", ("a",), 1, {}, MEANT.code, False, "/there", True, 4000)


class PlayedClient:
    """A client of workers that a test plays.

    Attributes:
        answers: of the workers that answer, by address; they are fit, but for those.
        asked: the addresses of those that were asked who they are.
    """

    def __init__(self, *fit, **unfit):
        self.answers = {address: FACTS for address in fit} | unfit
        self.asked = []
        self.status = "running"

    def subscribe_topic(self, topic, handler):
        """Has no events."""

    def nthreads(self):
        """Has no workers."""
        return {}

    processing = nthreads

    def run(self, function, *words, workers, **given):
        """Asks a worker, or has lost the scheduler."""
        if not self.answers:
            raise OSError("the connection is closed")
        [address] = workers
        if function is platform.python_version:
            return {address: "3"}
        self.asked.append(address)
        answer = self.answers[address]._asdict()
        return {address: {x: y for x, y in answer.items() if x != "address"}}

    def close(self, timeout):
        """Ends."""
        self.status = "closed"


def answered(roster, *present):
    """Updates a roster until all workers have answered."""
    roster.update({*present})
    until(lambda: roster.update({*present}) or not roster.asked, "all answer")


def test_worker_that_is_started_again_at_its_address_is_asked_again(tmp_path):
    lines, client = [], PlayedClient(a=FACTS._replace(is_stale=True))
    roster = Roster(client, MEANT, tmp_path / "out", lines.append)
    for _ in range(2):
        answered(roster, "a")
    [line] = lines
    assert line.endswith("has changed since it started: restart it")
    answered(roster)
    client.answers["a"] = FACTS
    answered(roster, "a")
    assert [*roster.seats] == ["a"]
    assert client.asked == ["a", "a"] and len(lines) == 1
    assert not [*tmp_path.iterdir()]  # the file that workers may see


def test_worker_of_another_python_is_refused_before_it_gets_bytecode(tmp_path):
    lines, client = [], PlayedClient("a")
    client.run = lambda function, **_: {"a": function()}
    meant = Expected({"jax": "1", "python": "2.7"}, {})
    answered(Roster(client, meant, tmp_path / "out", lines.append), "a")
    has = f"it has python {platform.python_version()}, but this command has 2.7"
    assert lines == [f"the Dask worker a is refused: {has}"]


class Game:
    """Seating for two processes on workers that a test plays.

    Attributes:
        lines: what the user was told.
    """

    def __init__(self, folder, *workers):
        self.lines, self.now, self.client = [], 0.0, PlayedClient(*workers)
        words = self.client, 2, MEANT, folder / "out", self.lines.append
        self.seating = Seating(*words)

    def find(self, *present, busy=(), seconds=0.0):
        """Looks for a while."""
        for wait in (0, seconds, 0, 0):
            self.now += wait
            idle = frozenset(present) - {*busy}
            if place := self.seating.find(frozenset(present), idle, self.now):
                return place
            answered(self.seating.roster, *present)
        return None

    @property
    def chosen(self):
        """The addresses of the workers of the last placement."""
        return [seat.address for seat in self.seating.seats]


A, B, C = (f"tcp://{name}:1" for name in "abc")


@pytest.fixture
def game(tmp_path):
    return Game(tmp_path, A, B, C)


def test_run_starts_where_all_workers_are_idle(game):
    assert game.find(A) is None
    assert game.find(A, B) == ("a:4000", [("a",), ("a",)])
    assert not game.lines


@pytest.mark.parametrize("taken, idle", [(A, [B, C]), (B, [A, C])])
def test_worker_that_others_have_taken_meanwhile_is_not_waited_for(game, taken, idle):
    waits = "waiting for Dask workers: 1 of 2 missing"
    assert game.find(taken, seconds=3) is None
    assert game.lines == [waits]
    assert game.find(taken, idle[0], busy=[taken], seconds=9) is None
    assert game.lines[-1] == waits
    assert game.find(taken, *idle, busy=[taken]) is not None
    assert game.chosen == idle


def test_worker_that_others_have_taken_meanwhile_counts_once_it_is_idle(game):
    game.find(A, seconds=3)
    assert game.find(A, B, busy=[A], seconds=3) is None
    assert game.find(A, B) is not None
    assert game.chosen == [A, B]


def test_worker_that_leaves_when_it_was_chosen_is_replaced(game):
    game.find(A)
    assert game.find(B) is None
    assert game.find(B, C) is not None
    assert game.chosen == [B, C]


def test_port_is_one_that_was_free_a_moment_ago(game):
    game.find(A)
    for port in (4001, 4002):  # of another attempt
        game.client.answers[A] = FACTS._replace(port=port)
        assert game.find(A, B)[0] == f"a:{port}"


def test_locks_of_editors_are_no_code(monkeypatch, tmp_path):
    folder = tmp_path / "edited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(inspection, "PACKAGES", ("edited_package",))
    before = expected({}, ())
    (folder / ".#__init__.py").symlink_to("me@host.1234:5678")
    assert expected({}, ()) == before
    (folder / "__init__.py").write_text("x = 2\n")
    assert expected({}, ()) != before


def test_signal_after_the_loss_of_the_scheduler_makes_no_noise(monkeypatch, tmp_path):
    noise = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    config = parse(["--scheduler", "tcp://a:1", "--processes", "2"])
    monkeypatch.setattr(cluster_processes, "connect", lambda *_: PlayedClient())
    processes = ClusterProcesses(config, [], tmp_path, Limits(), noise.append)
    before = threading.active_count()
    processes.signal(signal.SIGTERM)
    until(lambda: threading.active_count() <= before, "the signal is passed on")
    processes.close()
    assert not noise


class PlayedChild:
    """A process that runs until it is killed."""

    def __init__(self, *given):
        self.status, self.is_over = ProcessStatus(1, 123, "train", 7), False

    def poll(self, now, limits):
        """Finds nothing new."""

    def kill(self):
        """Ends it."""
        self.status, self.is_over = self.status._replace(code=-9), True

    def reap(self):
        """Finds it gone."""


@pytest.mark.parametrize("state, is_cut", [("closing", True), ("running", False)])
def test_worker_that_closes_is_named_for_the_end_of_its_process(
    state, is_cut, monkeypatch
):
    sent = []
    worker = SimpleNamespace(
        address=A,
        latency=0.1,
        status=SimpleNamespace(name=state),
        state=SimpleNamespace(tasks={}),  # the command has taken the task back
        get_current_task=lambda: "key",
        log_event=lambda topic, message: sent.append(message),
    )
    monkeypatch.setattr("distributed.get_worker", lambda: worker)
    monkeypatch.setattr(member, "Child", PlayedChild)
    run_member("topic", 1, [], {"process": 1}, "/there", Limits())
    status = ProcessStatus(**sent[-1]["status"])
    line = end_line(TrackedProcess(status, "b", 0.0, 0.0), 20.0)
    closes = f"process 1: its Dask worker {A} is closing or has lost the scheduler"
    killed = "process 1 (pid 123 on b) was killed by SIGKILL at step 7"
    assert line == (closes if is_cut else killed)


def test_worker_is_asked_by_functions_that_need_not_our_code(monkeypatch, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("alone.py", "mine/tasks.py"):
        (tmp_path / name).write_text("raise AssertionError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine" / "parts").mkdir()
    (tmp_path / "mine" / "parts" / "__init__.py").write_text("")
    names = ("alone:task", "mine.tasks:task", "bmuf")
    versions = {"python": platform.python_version(), "numpy": metadata.version("numpy")}
    meant = expected(versions, names)
    worker, sent = SimpleNamespace(), []

    def run(function, *words, workers):
        sent.append(dumps(function))
        on_it = {"dask_worker": worker} if len(sent) == 2 else {}
        return {workers[0]: loads(sent[-1])(*words, **on_it)}

    client = SimpleNamespace(run=run)
    found = workers.ask(client, "tcp://[::1]:1", meant, str(tmp_path / "alone.py"))
    assert found.sees_out and 0 < found.port < 65536
    assert found.code == meant.code and not found.is_stale
    assert worker.syncalgos_code == [meant.code[x] for x in inspection.PACKAGES]
    assert found.versions == versions
    assert [*meant.code] == [*inspection.PACKAGES, "alone", "mine"]
    absent = inspection.facts(["not-there"], ["not_there"])
    assert (absent["versions"]["not-there"], absent["code"]["not_there"]) == ("", None)
    words = [sys.executable, "-c", "import pickle, sys; pickle.load(sys.stdin.buffer)"]
    elsewhere = {"cwd": tmp_path, "env": environment(PYTHONPATH=None)}
    subprocess.run(words, input=sent[1], check=True, **elsewhere)
