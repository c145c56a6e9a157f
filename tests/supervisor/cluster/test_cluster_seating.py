"""Admission and places of workers, with a cluster that is played here."""

import pickle
import signal
import threading
from types import SimpleNamespace

import pytest
from faults import until

from experiments.launch.cluster import member, workers
from experiments.launch.cluster.cluster_processes import ClusterProcesses
from experiments.launch.cluster.member import Order, report_port, run_member
from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.seating import Request, Seating
from experiments.launch.cluster.workers import (
    Expected,
    WorkerFacts,
    expected,
    inspection,
)
from experiments.launch.supervisor.group import Rules
from experiments.launch.supervisor.process_status import (
    ProcessStatus,
    TrackedProcess,
    end_line,
)

MEANT = Expected({}, "0", {})
FACTS = WorkerFacts(("a", "", ""), 1, {}, "0", "0", "/there", {}, True)


class PlayedClient:
    """A client of workers that answer when a test says so.

    Attributes:
        asked: what was submitted: function, arguments and the worker's address.
    """

    def __init__(self):
        self.asked = []
        self.status = "running"

    def subscribe_topic(self, topic, handler):
        """Has no events."""

    def nthreads(self):
        """Has no workers."""
        return {}

    def run(self, *words, **given):
        """Has lost the scheduler."""
        raise OSError("the connection is closed")

    def close(self, timeout):
        """Ends."""
        self.status = "closed"

    def submit(self, function, *words, workers, **given):
        """Takes a question to a worker."""
        [address] = workers
        self.asked.append((function, words, address))
        return SimpleNamespace(status="pending")


def answer(address, **changes):
    """A worker's answer to the roster; it is fit, but for the changes."""
    return {"address": address, "facts": FACTS._replace(**changes)._asdict()}


def test_worker_that_is_started_again_at_its_address_is_asked_again(tmp_path):
    lines = []
    roster = Roster(PlayedClient(), "topic", MEANT, tmp_path / "out", lines.append)
    roster.update({"a"})
    roster.take(answer("a", loaded="1"))
    roster.update({"a"})
    assert not roster.is_asking
    [line] = lines
    assert line.endswith("has changed since: start it again")
    roster.update(set())
    roster.update({"a"})
    roster.take(answer("a"))
    assert [*roster.seats] == ["a"]
    assert len(lines) == 1


class Game:
    """Seating for two processes on workers that a test plays.

    Attributes:
        lines: what the user was told.
    """

    def __init__(self, folder):
        self.lines, self.now, self.client = [], 0.0, PlayedClient()
        request = Request("tcp://a:1", 2, [], folder / "out", MEANT)
        self.seating = Seating(self.client, "topic", request, self.lines.append)

    def find(self, *present, busy=(), seconds=0.0):
        """Looks for a while; those workers answer that are idle."""
        for wait in (0, 0, seconds, 0, 0, 0):
            self.now += wait
            if place := self.seating.find(frozenset(present), self.now):
                return place
            for question in [x for x in self.client.asked if x[-1] not in busy]:
                self.client.asked.remove(question)
                self._answer(*question)
        return None

    @property
    def chosen(self):
        """The addresses of the workers of the last placement."""
        return [seat.address for seat in self.seating.seats]

    def _answer(self, function, words, address):
        if function is not report_port:
            self.seating.take(answer(address))
            return
        _, choice, host = words
        port = 4000 if host else 0
        self.seating.take({"choice": choice, "address": address, "port": port})


@pytest.fixture
def game(tmp_path):
    return Game(tmp_path)


A, B, C = (f"tcp://{name}:1" for name in "abc")


def test_run_starts_where_all_workers_are_idle(game):
    assert game.find(A) is None
    assert game.find(A, B) == ("a:4000", 1, [(0, 0, 2), (1, 1, 2)], ["a", "a"])
    assert not game.lines


@pytest.mark.parametrize("taken, idle", [(A, [B, C]), (B, [A, C])])
def test_worker_that_others_have_taken_meanwhile_is_not_waited_for(game, taken, idle):
    waits = "waiting for 1 more of 2 workers"
    assert game.find(taken, seconds=3) is None
    assert game.lines == [waits]
    # It was idle when it was asked who it is, and is chosen.
    assert game.find(taken, idle[0], busy=[taken], seconds=9) is None
    assert game.lines == [waits]
    assert game.find(taken, *idle, busy=[taken]) is not None
    assert game.chosen == idle


def test_worker_that_others_have_taken_meanwhile_counts_once_it_is_idle(game):
    game.find(A, seconds=3)
    assert game.find(A, B, busy=[A], seconds=9) is None
    assert game.find(A, B) is not None
    assert game.chosen == [A, B]


@pytest.mark.parametrize("leaves, stays", [(A, B), (B, A)])
def test_worker_that_leaves_when_it_was_chosen_is_replaced(game, leaves, stays):
    game.find(leaves)
    assert game.find(A, B, busy=[leaves]) is None
    assert game.find(stays, C) is not None
    assert game.chosen == [stays, C]


def test_locks_of_editors_are_no_code(monkeypatch, tmp_path):
    folder = tmp_path / "edited_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "PACKAGES", ("edited_package",))
    before = expected({}, ())
    (folder / ".#__init__.py").symlink_to("me@host.1234:5678")
    assert expected({}, ()) == before
    (folder / "__init__.py").write_text("x = 2\n")
    assert expected({}, ()) != before


def test_signal_after_the_loss_of_the_scheduler_makes_no_noise(monkeypatch, tmp_path):
    noise = []
    monkeypatch.setattr(threading, "excepthook", noise.append)
    request = Request("tcp://a:1", 2, [], tmp_path, MEANT)
    processes = ClusterProcesses(PlayedClient(), request, Rules(), noise.append)
    before = threading.active_count()
    processes.signal(signal.SIGTERM)
    until(lambda: threading.active_count() <= before, "the signal is passed on")
    processes.close()
    assert not noise


class PlayedChild:
    """A process that runs until it is killed."""

    def __init__(self, *given):
        self.status, self.is_over = ProcessStatus(1, 123, "train", 7), False

    def poll(self, now, rules):
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
    run_member(Order("topic", 1, [], {"process": 1}, "/there", Rules()))
    status = ProcessStatus(**sent[-1]["status"])
    line = end_line(TrackedProcess(status, "b", 0.0, 0.0), 20.0)
    closes = f"process 1: its Dask worker {A} closes, or has lost the scheduler"
    killed = "process 1 (pid 123 on b) was killed by SIGKILL at step 7"
    assert line == (closes if is_cut else killed)


def test_worker_is_asked_in_text_that_any_python_reads(monkeypatch, tmp_path):
    (tmp_path / "mine").mkdir()
    for name in ("alone.py", "mine/tasks.py"):
        (tmp_path / name).write_text("raise AssertionError('it is not imported')")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("alone:task", "mine.tasks:task", "not_there:task", "bmuf")
    meant = expected({"python": "3", "numpy": "2", "nothing": "1"}, names)
    sent = []
    worker = SimpleNamespace(address=A, log_event=lambda *words: sent.append(words))
    monkeypatch.setattr("distributed.get_worker", lambda: worker)
    # Functions of ours would not pass without their module or bytecode.
    job = inspection(meant, str(tmp_path / "alone.py"), "topic")
    function, *words = pickle.loads(pickle.dumps(job))
    function(*words)
    [(topic, message)] = sent
    found = WorkerFacts(**message["facts"])
    assert (topic, message["address"], found.sees) == ("topic", A, True)
    assert found.code == found.loaded == meant.code
    assert found.versions["nothing"] == "" and found.versions["numpy"]
    assert found.own == meant.own
    assert found.own["alone"] == found.own["mine.tasks"] != ""
    assert found.own["not_there"] is None
