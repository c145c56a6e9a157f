"""The collectives of a compiled program, as its HLO text tells them.

Programs of CPUs, TPUs and GPUs are written alike, but for what goes on in the
background:

- GPUs: `all-reduce-start` and `all-reduce-done`, and so on for all kinds;
- TPUs: the same for permutations; other collectives are spread over fusions, from one
  with `AsyncCollectiveStart` to one with `AsyncCollectiveDone`, and appear in each;
- TPUs: a reduce-scatter is a fusion of an all-reduce and a slice of it;
- TPUs of several slices: the program is that of one slice, and knows the others only as
  hosts, by `send` and `recv` to `xla_megascale_runtime`.
"""

from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from experiments.aiming import hlo_text
from experiments.aiming.hlo_text import Instruction, Module

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}
"""The ledger's names of HLO's collectives."""

# Between a start and its done these do not compute: they only name or move data.
_IDLE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy"}
_IDLE |= {"after-all", "opt-barrier", "partition-id", "replica-id", "send", "recv"}


class Collective(NamedTuple):
    """A collective.

    Attributes:
        kind: as the ledger names it.
        bytes: that each device sends by rings.
        size: bytes of its operands on a device.
        groups: of the positions of the devices that take part together; of a
            permutation the pairs (from, to). See `slices`.
        computation: the name of the computation that it is in.
        dtypes: of its operands.
        overlapped: whether anything is computed between its start and its end.
        op_name: of the jax code that asked for it, if the compiler kept it.
        slices: whether it goes between TPU slices. Its groups then hold the devices'
            ids. The groups of others in such a program are of positions in a slice.
        times: it runs in a step (in the program, outside of the loop over steps): more
            than once in loops, as over layers.
        is_looped: whether it is in the loop over local steps.
        choices: the branches that lead to it, outermost first: (conditional, branch).
        promoted: whether the compiler made the type wider than the program asked for,
            such as bfloat16 that is sent as float32.
    """

    kind: str
    bytes: Fraction
    size: int
    groups: list[list[int]]
    computation: str
    dtypes: tuple[str, ...] = ()
    overlapped: bool = False
    op_name: str = ""
    slices: bool = False
    times: int = 1
    is_looped: bool = False
    choices: tuple[tuple[str, str], ...] = ()
    promoted: bool = False


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        collectives: in the order of the program.
        entry: the name of the computation that it begins with.
        conditional: the names of all computations that only a branch calls.
        looped: those within the loop over local steps.
        steps: of that loop; 1 without one, None if the text does not tell it.
        unknown: loops with collectives that run an unknown number of times, counted as
            once.
    """

    collectives: list[Collective]
    entry: str
    conditional: set[str]
    looped: set[str]
    steps: int | None
    unknown: list[str]


class _Place(NamedTuple):
    """The way to a computation: in how many loops and branches it is.

    `overlapped` is that of the start which calls it, if one does.
    """

    is_looped: bool = False
    times: int = 1
    choices: tuple[tuple[str, str], ...] = ()
    overlapped: bool = False


def read(text: str) -> Program:
    """Reads the HLO text of a compiled program.

    The loop over local steps is the largest of those that no other loop holds.
    """
    module = hlo_text.parse(text)
    sent = {name: _sent(name, module) for name in module.computations}
    busy = _reaching(module, {name for name, found in sent.items() if found})
    steps = _step_loop(module)
    conditional, looped, unknown = set(), set(), []
    collectives: list[Collective] = []

    def visit(name: str, place: _Place) -> None:
        if place.choices:
            conditional.add(name)
        if place.is_looped:
            looped.add(name)
        for number in range(len(module.computations[name])):
            if found := sent[name].get(number):
                overlapped = found.overlapped or place.overlapped
                where = place._replace(overlapped=overlapped)
                collectives.append(found._replace(**where._asdict()))
            for callee, where in calls(name, number, place):
                visit(callee, where)

    def calls(name: str, number: int, place: _Place) -> Iterator[tuple[str, _Place]]:
        lines = module.computations[name]
        line = lines[number]
        callees = [(key, x) for key, x in line.called if x in busy]
        if line.opcode == "while" and callees:
            place = inner(line, place)
        if line.opcode == "async-start" and callees:
            place = place._replace(overlapped=_works_until_done(lines, number))
        for key, callee in callees:
            is_branch = line.opcode == "conditional" and key != "to_apply"
            taken = ((line.name, callee),) if is_branch else ()
            yield callee, place._replace(choices=place.choices + taken)

    def inner(loop: Instruction, place: _Place) -> _Place:
        if loop is steps:
            return place._replace(is_looped=True)
        count = hlo_text.trips(loop, module)
        if count is None:
            unknown.append(loop.name)
        return place._replace(times=place.times * (1 if count is None else count))

    visit(module.entry, _Place())
    count = 1 if steps is None else hlo_text.trips(steps, module)
    found = collectives, module.entry, conditional, looped
    return Program(*found, count, unknown)


def _reaching(module: Module, goal: set[str]) -> set[str]:
    """The computations of the goal, and all that lead to one of them."""
    calls = {
        name: {x for line in lines for _, x in line.called}
        for name, lines in module.computations.items()
    }
    found = set(goal)
    while more := {x for x, callees in calls.items() if callees & found} - found:
        found |= more
    return found


def _step_loop(module: Module) -> Instruction | None:
    """The largest loop that is in no other."""
    weights: dict[str, int] = {}

    def weight(name: str) -> int:
        if name not in weights:
            lines = module.computations.get(name, [])
            called = {x for line in lines for _, x in line.called}
            weights[name] = len(lines) + sum(map(weight, called))
        return weights[name]

    loops, seen, todo = [], set(), [module.entry]
    while todo:
        name = todo.pop()
        seen.add(name)
        for line in module.computations.get(name, []):
            if line.opcode == "while":
                loops.append(line)
            else:
                todo += [x for _, x in line.called if x not in seen]
    return max(
        loops, key=lambda x: sum(weight(name) for _, name in x.called), default=None
    )


def _sent(name: str, module: Module) -> dict[int, Collective]:
    """The collectives of a computation by their line, as if it ran once."""
    lines = module.computations[name]
    types = {x.name: x.type for x in lines}
    is_start = any('"AsyncCollectiveStart"' in x.rest for x in lines)
    found = {}
    for place, line in enumerate(lines):
        kind = _kind(line, name)
        if kind is not None and not _is_continued(line, is_start):
            overlapped = is_start or _works_until_done(lines, place)
            made = _collective(kind, line, types, module)
            found[place] = made._replace(computation=name, overlapped=overlapped)
        elif line.opcode == "send" and "_xla_megascale_transfer_type" in line.rest:
            overlapped = _works_until_done(lines, place)
            made = _between_slices(line, types)
            found[place] = made._replace(computation=name, overlapped=overlapped)
    return found


def _kind(line: Instruction, computation: str) -> str | None:
    kind = KINDS.get(line.opcode.removesuffix("-start"))
    is_part = kind == "all_reduce" and computation.startswith("all-reduce-scatter")
    return "reduce_scatter" if is_part else kind


def _is_continued(line: Instruction, is_start: bool) -> bool:
    """Whether a collective only goes on here, that a TPU fusion before has begun."""
    return "async_collective_fusion_config" in line.rest and not is_start


def _operands(line: Instruction, types: dict[str, str]) -> list[str]:
    return [types[x] for x in line.operands if not types[x].startswith("token")]


def _collective(
    kind: str, line: Instruction, types: dict[str, str], module: Module
) -> Collective:
    operands = _operands(line, types)
    size = sum(map(hlo_text.size, operands))
    groups = hlo_text.groups(line.rest, module.devices)
    share = hlo_text.share(kind, len(groups[0]))
    promoted = "_promoted" in line.rest.partition("metadata=")[0]
    return Collective(
        kind,
        share * size,
        size,
        groups,
        "",
        hlo_text.dtypes(operands),
        op_name=line.attribute("op_name") or "",
        promoted=promoted,
    )


def _between_slices(line: Instruction, types: dict[str, str]) -> Collective:
    """The bytes that a device hands to its host, for those of other slices.

    An array that all slices reduce goes over the network by the hosts; we take it that
    they send as rings do.
    """
    kind = hlo_text.slice_kind(line)
    operands = _operands(line, types)
    size = sum(map(hlo_text.size, operands))
    groups = hlo_text.slice_groups(line.rest)
    share = hlo_text.share(kind, len(groups[0]))
    name = line.attribute("_xla_host_transfer_rendezvous") or ""
    kinds = hlo_text.dtypes(operands)
    return Collective(
        kind, share * size, size, groups, "", kinds, op_name=name, slices=True
    )


def _works_until_done(lines: list[Instruction], place: int) -> bool:
    """Whether instructions between a start and its done compute."""
    start = lines[place]
    # A GPU's stream waits at the start itself.
    is_start = start.opcode.endswith("-start") or start.opcode == "send"
    if not is_start or '"is_sync":true' in start.rest:
        return False
    done = start.opcode.removesuffix("-start") + "-done"
    names = {start.name}
    if start.opcode == "send":
        done, names = "recv-done", _receiving(start, lines)
    for line in lines[place + 1 :]:
        if line.opcode == done and names & {*line.operands}:
            return False
        if line.opcode.endswith("-update") and names & {*line.operands}:
            names.add(line.name)
        background = line.opcode.endswith(("-start", "-done", "-update"))
        if line.opcode not in _IDLE and not background and line.opcode not in KINDS:
            return True
    return False


def _receiving(send: Instruction, lines: list[Instruction]) -> set[str]:
    """The recv that a send between slices meets, by the name that both have."""
    key = "_xla_host_transfer_rendezvous"
    meeting = send.attribute(key)
    return {x.name for x in lines if x.opcode == "recv" and x.attribute(key) == meeting}
