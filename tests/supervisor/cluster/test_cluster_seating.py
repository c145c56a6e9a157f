"""Who may take part, and where, with a cluster that is played here."""

from types import SimpleNamespace

import pytest

from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.workers import Expected, WorkerFacts

MEANT = Expected({}, "0", ())
FACTS = WorkerFacts(("a", "", ""), 1, {}, "0", "0", "/there", [], True)


class PlayedClient:
    """A client whose workers answer when a test says so.

    Attributes:
        asked: what was submitted: function, arguments and the worker's address.
    """

    def __init__(self):
        self.asked = []

    def submit(self, function, *words, workers, **given):
        """Takes a question to a worker."""
        [address] = workers
        self.asked.append((function, words, address))
        return SimpleNamespace(status="pending")


def answer(address, **changes):
    """A worker's answer to the roster; it is fit, but for the changes."""
    return {"address": address, "facts": FACTS._replace(**changes)._asdict()}


@pytest.fixture
def roster(tmp_path):
    """A roster, whose client and lines a test looks at."""
    lines = []
    found = Roster(PlayedClient(), "topic", MEANT, tmp_path / "out", lines.append)
    found.lines = lines
    return found


def test_worker_that_is_started_again_at_its_address_is_asked_again(roster):
    roster.update({"a"})
    roster.take(answer("a", loaded="1"))
    roster.update({"a"})
    assert not roster.is_asking
    [line] = roster.lines
    assert line.endswith("has changed since: start it again")
    roster.update(set())
    roster.update({"a"})
    roster.take(answer("a"))
    assert [*roster.seats] == ["a"]
    assert len(roster.lines) == 1
