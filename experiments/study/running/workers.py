"""The Dask workers of a study: which of them are there, and which are let in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from experiments.cli.errors import BadRequest
from experiments.launch.cluster.roster import Roster
from experiments.launch.cluster.view import ClusterView
from experiments.study.running import member
from experiments.study.running.member import Terms
from experiments.study.running.progress import StudyProgress

if TYPE_CHECKING:
    from distributed import Client, Future


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
        own: digests of the user's own modules here, by name.
        names: of algorithms and tasks.
        bar: where refusals are shown.
        accepted: by address, those that are there now.
    """

    client: "Client"
    view: ClusterView
    roster: Roster
    terms: Terms
    first: tuple[Sequence[str], int]
    own: Mapping[str, str]
    names: Sequence[str]
    bar: StudyProgress
    accepted: dict[str, Worker] = field(default_factory=dict)
    _asked: dict[str, "Future"] = field(default_factory=dict)
    _devices: str = ""

    def look(self) -> Iterator[Worker]:
        """Updates who is there; yields those that are lost."""
        present = self.view.workers
        self.roster.update(present)
        for address in self.roster.seats.keys() - self._asked.keys():
            self._asked[address] = self.client.submit(
                member.introduce,
                self.terms,
                *self.first,
                self.names,
                workers=[address],
                key=f"introduction of {address} to {self.terms.study}",
                pure=False,
            )
        for address in self._asked.keys() - present:
            del self._asked[address]
            if lost := self.accepted.pop(address, None):
                yield lost

    def take(self, message: dict[str, Any]) -> None:
        """Takes a worker's answer to the roster."""
        self.roster.take(message)

    def introduced(self) -> None:
        """Lets in those that have the data, or names what is wrong.

        Raises:
            BadRequest: it is a worker of this command's own cluster.
        """
        for address, future in self._asked.items():
            if not future.done() or address in self.accepted:
                continue
            seat = self.roster.seats[address]
            slots = self.view.threads(address)
            worker = Worker(address, seat.host[0], slots, seat.sees_out)
            if why := self._objection(future):
                if self.client.cluster is not None:  # nobody else will come
                    raise BadRequest(why)
                self.bar.say_once(f"the Dask worker {worker} is refused: {why}")
                continue
            self._devices = self._devices or future.result()["devices"]
            self.accepted[address] = worker

    def _objection(self, future: "Future") -> str:
        """Returns why a worker is not let in; "" if it is."""
        if future.status != "finished":
            text = " ".join(str(future.exception()).split())
            return f"{type(future.exception()).__name__}: {text}"
        found = future.result()
        if "devices" not in found:
            return str(next(found[x] for x in ("failed", "disk", "line") if x in found))
        for name, digest in self.own.items():
            if found["own"].get(name) != digest:
                return f"its code of {name} differs from this command's"
        if found["devices"] != (self._devices or found["devices"]):
            return f"it computes on {found['devices']}, the others on {self._devices}"
        return ""
