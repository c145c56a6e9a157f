"""The Dask workers of a study: which of them are there, and which are let in."""

import queue
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.cli.errors import BadRequest
from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.view import ENDS, ClusterView
from experiments.study.running import member
from experiments.study.running.member import Terms
from experiments.study.running.progress import StudyProgress
from experiments.study.running.versions import of_settings

if TYPE_CHECKING:
    from distributed import Client, Future

FETCHING = 10.0  # seconds to fetch a result


class Worker(NamedTuple):
    """A Dask worker that may make runs.

    Attributes:
        address: as the scheduler knows it.
        host: name of its machine.
        slots: how many runs it makes at a time: its threads.
        is_shared: whether it sees the study's folder.
    """

    address: str
    host: str
    slots: int
    is_shared: bool

    def __str__(self) -> str:
        return f"{self.address} on {self.host}"


@dataclass
class Workers:
    """The workers of a scheduler.

    The roster asks each for versions and code. Those that it lets in load the data of a
    run in a child process, before they get work.

    Attributes:
        client: of the scheduler.
        view: of the workers that are there.
        roster: of those that have the command's versions and code.
        terms: of the study.
        first: flags and seed of a run, whose data every worker must have.
        bar: where refusals are shown.
        inbox: of events and answers, which come in other threads.
        accepted: by address, those that are there now.
        asked: the introductions, by address; refused workers have a process, too.
    """

    client: "Client"
    view: ClusterView
    roster: Roster
    terms: Terms
    first: tuple[Sequence[str], int]
    bar: StudyProgress
    inbox: "queue.SimpleQueue[Any]" = field(default_factory=queue.SimpleQueue)
    accepted: dict[str, Worker] = field(default_factory=dict)
    asked: dict[str, "Future"] = field(default_factory=dict)
    _devices: str = ""

    def look(self) -> Iterator[Worker]:
        """Updates who is there; yields those that are lost."""
        present = self.view.workers
        self.roster.update(present)
        for address in self.roster.seats.keys() - self.asked.keys():
            asked = self.asked[address] = self.client.submit(
                member.introduce,
                self.terms,
                *self.first,
                workers=[address],
                key=f"introduction-{secrets.token_hex(4)} of {address}",
                pure=False,
            )
            self.expect(asked, address)
        for address in self.asked.keys() - present:
            del self.asked[address]
            if lost := self.accepted.pop(address, None):
                yield lost

    def expect(self, future: "Future", address: str = "") -> None:
        """Has the end of a task put into the inbox, as an `Answer`."""
        future.add_done_callback(lambda ended: self.inbox.put(answered(ended, address)))

    def introduced(self, address: str, found: Mapping[str, Any]) -> None:
        """Lets a worker in that has the data, or names what is wrong.

        Raises:
            BadRequest: it is a worker of this command's own cluster.
        """
        if address not in self.asked:  # it has left
            return
        if not found:
            del self.asked[address]  # and is asked again
            return
        seat, slots = self.roster.seats[address], self.view.threads(address)
        worker = Worker(address, seat.host[0], slots, seat.sees_out)
        if why := self._objection(found):
            if self.client.cluster is not None:  # nobody else will come
                raise BadRequest(why)
            self.bar.say_once(f"the Dask worker {worker} is refused: {why}")
            return
        self._devices = found["devices"]
        self.accepted[address] = worker

    def _objection(self, found: Mapping[str, Any]) -> str:
        """Returns why a worker is not let in; "" if it is."""
        if "devices" not in found:
            return found.get("failed") or found.get("disk") or found["line"]
        for name, here in of_settings().items():
            if (there := found["settings"].get(name)) != here:
                return f"it has {name} {there!r}, this command {here!r}"
        if found["devices"] != (self._devices or found["devices"]):
            return f"it computes on {found['devices']}, the others on {self._devices}"
        return ""


class Answer(NamedTuple):
    """The end of a task.

    Attributes:
        future: of the task.
        found: its result; {} if it was lost.
        address: of the worker that was introduced; "" for a run.
    """

    future: "Future"
    found: Mapping[str, Any]
    address: str = ""


def answered(future: "Future", address: str = "") -> Answer:
    """Fetches the result of a task that has ended; called in a thread of Dask's."""
    try:
        if future.status == "error":
            error = future.exception(FETCHING)
            text = f"{type(error).__name__}: {' '.join(str(error).split())}"
            return Answer(future, {"failed": text, "is_request": False}, address)
        found = future.result(FETCHING) if future.status == "finished" else {}
    except ENDS:  # it was lost with its worker
        found = {}
    return Answer(future, found, address)
