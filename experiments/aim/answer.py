"""What a job of aim answers: the findings in a program, or why there is none."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

Counts = Mapping[str, Sequence[float]]
"""(bytes, calls) by the kind of a collective."""


@dataclass(frozen=True)
class TrafficRow:
    """Similar collectives of a program, which a table shows in one row.

    Bytes include repetitions in loops within a step, such as over layers.

    Attributes:
        scope: "across workers", or "inside a worker" if only its devices take part.
        when: "sync", only in a branch; "step", at each local step; "dispatch", once per
            program, outside of the loop over local steps.
        network: "inside" a slice or host, or "between" them if devices that take part
            are in different ones.
        kind: the collective's name in the ledger.
        calls: number of collectives in one such sync, step or dispatch.
        group: number of devices that take part together; 2 for a permutation.
        bytes: bytes that a device sends by rings in one sync, step or dispatch; if only
            some devices take part in permutations, those of the busiest device.
        overlapped: number of the calls during which something is computed.
        rings: for "between", the number of a group's devices in one place. As many
            rings can pass from place to place, each over its own device's adapter,
            which then carries bytes / rings, as with NCCL. 1 for permutations and
            all-to-alls, and for TPU slices, where the compiler itself cuts arrays for
            all devices.
        choice: the conditional of a sync. Of the rows with the same choice, a step
            sends those of one branch.
        branch: the branch of that conditional.
        dtypes: types of the sent arrays.
        promoted: number of the calls whose type the compiler has widened.
    """

    scope: str
    when: str
    network: str
    kind: str
    calls: int = 0
    group: int = 1
    bytes: float = 0.0
    overlapped: int = 0
    rings: int = 1
    choice: str = ""
    branch: str = ""
    dtypes: tuple[str, ...] = ()
    promoted: int = 0

    def to_json(self) -> dict[str, Any]:
        """Returns the row in JSON's types."""
        return {**asdict(self), "dtypes": [*self.dtypes]}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "TrafficRow":
        """Returns the row that a file holds."""
        return _read(cls, {**content, "dtypes": tuple(content.get("dtypes", ()))})


@dataclass(frozen=True)
class Memory:
    """The bytes of a chip that a program takes.

    Attributes:
        arguments: bytes of the arguments.
        outputs: bytes of the outputs.
        aliased: bytes of the outputs that replace arguments, such as the donated state.
        temporary: bytes of intermediate results.
        code: bytes of the program itself.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int

    @property
    def chip_bytes(self) -> int:
        """The bytes on a chip while the program runs; what is aliased counts once."""
        state_bytes = self.arguments + self.outputs - self.aliased
        return state_bytes + self.temporary + self.code


@dataclass(frozen=True)
class StepFlops:
    """The operations of a device.

    Attributes:
        step: those of a local step.
        sync: those that syncs add to a step.
    """

    step: float
    sync: float


@dataclass(frozen=True)
class Ledger:
    """The ledger's counts of a program, per device.

    Attributes:
        always: what each step sends.
        branched: what all branches of a step send in addition.
    """

    always: Counts
    branched: Counts


@dataclass(frozen=True)
class StateArray:
    """An array of the state.

    Attributes:
        name: the part of the state and the name in it, such as "params/bias".
        shape: the shape of a chip's shard.
        bytes: the bytes of a chip's shard.
    """

    name: str
    shape: Sequence[int]
    bytes: int


# Fields of `Findings` that a file has only with a program, or only without one.
_PROGRAM_FIELDS = ("memory",)
_REFUSAL_FIELDS = ("refused", "needed")


@dataclass(frozen=True)
class Findings:
    """What compiling a run showed, in the order of the files of --json.

    A field is None where it does not apply.

    Attributes:
        slices: number of TPU slices.
        workers: number of workers.
        mesh: sizes of the axes within a worker.
        lanes: number of workers of a device.
        lane_form: the form of the lanes.
        batch_size: the global batch size.
        steps: local steps of the run.
        dispatch_steps: local steps of its longest dispatch.
        params: number of params.
        flops: the operations of a device.
        state: bytes of the state on a device, by part.
        largest: the leaves that take the most memory of a chip, the largest first.
        delay: how many local steps a message may take.
        versions: the versions of the packages.
        ledger: the ledger's counts; None if only a run can tell them.
        sends: the messages of the run, as of `training.sends`; None likewise.
        uncounted: why there is no ledger.
        compile_seconds: how long the compiler took.
        refused: what the compiler says where it refuses the program.
        needed: the bytes of a chip that a refused program needs, if it says so.
        memory: the bytes of a chip that the program takes, if the compiler tells them.
        traffic: the collectives of the program; None without one.
    """

    slices: int
    workers: int
    mesh: Mapping[str, int]
    lanes: int
    lane_form: str | None
    batch_size: int
    steps: int
    dispatch_steps: int
    params: int
    flops: StepFlops
    state: Mapping[str, int]
    largest: Sequence[StateArray]
    delay: int
    versions: Mapping[str, str]
    ledger: Ledger | None
    sends: Mapping[str, Any] | None
    uncounted: str | None
    compile_seconds: float
    refused: str | None
    needed: int | None
    memory: Memory | None
    traffic: Sequence[TrafficRow] | None

    @property
    def is_too_large(self) -> bool:
        """Whether the compiler refused the program because memory does not suffice."""
        text = self.refused or ""
        return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()

    @property
    def chip_bytes(self) -> int | None:
        """The bytes on a chip while the program runs; None if they are not known."""
        return self.needed if self.memory is None else self.memory.chip_bytes

    def to_json(self) -> dict[str, Any]:
        """Returns the findings in JSON's types."""
        absent_fields = _PROGRAM_FIELDS
        if self.refused is None:
            absent_fields = _REFUSAL_FIELDS
        content = asdict(self)
        for name in absent_fields:
            del content[name]
        if self.uncounted is None:
            del content["uncounted"]
        if self.traffic is not None:
            content["traffic"] = [row.to_json() for row in self.traffic]
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Findings":
        """Returns the findings that a file holds, perhaps of an older release."""
        names = [field.name for field in fields(cls)]
        values: dict[str, Any] = {name: content.get(name) for name in names}
        values["largest"] = [
            _read(StateArray, leaf) for leaf in content.get("largest", ())
        ]
        kinds = {"flops": StepFlops, "ledger": Ledger, "memory": Memory}
        for name, kind in kinds.items():
            if values[name] is not None:
                values[name] = _read(kind, values[name])
        if values["traffic"] is not None:
            values["traffic"] = [TrafficRow.from_json(x) for x in values["traffic"]]
        return cls(**values)


def _read(kind: type[Any], content: Mapping[str, Any]) -> Any:
    """Returns a dataclass's object from JSON, which may have further keys."""
    names = [field.name for field in fields(kind)]
    return kind(**{name: content[name] for name in names if name in content})


@dataclass(frozen=True)
class Answer:
    """What the process of a job answers: one of these.

    Attributes:
        findings: what compiling showed, even that the compiler refuses the program.
        error: why the run is refused, in one line.
        failed: how the process died, and its last line of output.
        timeout: the seconds after which it was given up.
    """

    findings: Findings | None = None
    error: str | None = None
    failed: str | None = None
    timeout: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the answer in JSON's types."""
        if self.findings is not None:
            return self.findings.to_json()
        reasons = {"error": self.error, "failed": self.failed, "timeout": self.timeout}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "Answer":
        """Returns the answer that a process or a file holds."""
        reasons = {
            name: content[name]
            for name in ("error", "failed", "timeout")
            if name in content
        }
        if reasons:
            return cls(**reasons)
        return cls(Findings.from_json(content))
