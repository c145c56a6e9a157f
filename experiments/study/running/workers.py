"""The Dask workers of a study: which of them are there, and which are let in."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from experiments.cli.errors import BadRequest
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


@dataclass
class Workers:
    """The workers of a scheduler, each asked once what it is.

    Attributes:
        client: of the scheduler.
        terms: of the study.
        first: flags and seed of a run, whose data every worker must have.
        expected: versions and code, as here.
        names: of algorithms and tasks.
        bar: where refusals are shown.
        accepted: by address, those that are there now.
    """

    client: "Client"
    terms: Terms
    first: tuple[Sequence[str], int]
    expected: Mapping[str, str]
    names: Sequence[str]
    bar: StudyProgress
    accepted: dict[str, Worker] = field(default_factory=dict)
    _asked: dict[str, "Future"] = field(default_factory=dict)
    _threads: dict[str, int] = field(default_factory=dict)
    _devices: str = ""

    def look(self) -> Iterator[Worker]:
        """Updates who is there; yields those that are lost."""
        info = self.client.scheduler_info(n_workers=-1)["workers"]
        self._threads = {address: x["nthreads"] for address, x in info.items()}
        for address in info.keys() - self._asked.keys():
            self._asked[address] = self.client.submit(
                member.introduce,
                self.terms,
                *self.first,
                self.names,
                workers=[address],
                key=f"introduction of {address} to {self.terms.study}",
                pure=False,
            )
        for address in self._asked.keys() - info.keys():
            del self._asked[address]
            if lost := self.accepted.pop(address, None):
                yield lost

    def introduced(self) -> None:
        """Lets in those that have said what they are, or names what is wrong.

        Raises:
            BadRequest: it is a worker of this command's own cluster.
        """
        for address, future in self._asked.items():
            if not future.done() or address in self.accepted:
                continue
            if why := self._objection(future):
                if self.client.cluster is not None:  # nobody else will come
                    raise BadRequest(why)
                self.bar.say_once(f"not used: worker {self._name(address)}: {why}")
                continue
            found = future.result()
            self._devices = self._devices or found["facts"]["devices"]
            self.accepted[address] = Worker(
                address, found["host"], self._threads[address], found["is_shared"]
            )

    def _name(self, address: str) -> str:
        future = self._asked[address]
        host = future.result()["host"] if future.status == "finished" else ""
        return f"{address} on {host}" if host else address

    def _objection(self, future: "Future") -> str:
        """Returns why a worker is not let in; "" if it is."""
        if future.status != "finished":
            text = " ".join(str(future.exception()).split())
            return f"{type(future.exception()).__name__}: {text}"
        found = future.result()
        if "facts" not in found:
            return str(found.get("failed") or found.get("disk") or found.get("line"))
        facts = found["facts"]
        for name, here in self.expected.items():
            if (there := facts.get(name)) != here:
                if name == "code":
                    return "its code of syncalgos is another one, of the same version"
                if any(own.startswith(f"{name}:") for own in self.names):
                    return f"its code of {name} is another one"
                return f"{name} {there}, not {here}"
        if facts["devices"] != (self._devices or facts["devices"]):
            return f"it computes on {facts['devices']}, the others on {self._devices}"
        return ""
