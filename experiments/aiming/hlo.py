"""The collectives of a compiled program, read from its HLO text.

Programs for CPUs, TPUs and GPUs have the same form, except for operations in the
background:

- GPUs: `all-reduce-start` and `all-reduce-done`, and so on for all kinds;
- TPUs: the same for permutations; other collectives are spread over fusions, from one
  with `AsyncCollectiveStart` to one with `AsyncCollectiveDone`, and appear in each;
- TPUs: a reduce-scatter is a fusion of an all-reduce and a slice of it;
- TPUs of several slices: the program is for one slice, and refers to the others only as
  hosts, by `send` and `recv` to `xla_megascale_runtime`.
"""

import functools
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

# Instructions that do not compute: they only name or move data.
_IDLE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy"}
_IDLE |= {"after-all", "opt-barrier", "partition-id", "replica-id", "send", "recv"}


class Collective(NamedTuple):
    """A collective.

    Attributes:
        kind: its name in the ledger.
        bytes: bytes that each device sends by rings.
        groups: groups of devices that take part together, by position; for a
            permutation the pairs (from, to). See `slices`.
        dtypes: types of its operands.
        overlapped: whether anything is computed between its start and its end.
        slices: whether it crosses TPU slices. Its groups then hold device ids. Other
            collectives of such a program have groups of positions in a slice.
        promoted: whether the compiler made the type wider than the program asked for,
            such as bfloat16 that is sent as float32.
        is_looped: whether it is in the loop over local steps.
        times: how often it runs in a step, or outside of the loop over steps in the
            program: more than once in loops, such as over layers. A loop of unknown
            length counts once.
        choices: the branches that lead to it, outermost first: (conditional, branch).
    """

    kind: str
    bytes: Fraction
    groups: list[list[int]]
    dtypes: tuple[str, ...] = ()
    overlapped: bool = False
    slices: bool = False
    promoted: bool = False
    is_looped: bool = False
    times: int = 1
    choices: tuple[tuple[str, str], ...] = ()


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        collectives: its collectives, in order.
        steps: number of steps in the loop over local steps; 1 without a loop, None if
            the text does not tell it.
    """

    collectives: list[Collective]
    steps: int | None


class _Place(NamedTuple):
    """The position of a computation: the loops and branches around it.

    `overlapped` comes from the start instruction that calls it, if there is one.
    """

    is_looped: bool = False
    times: int = 1
    choices: tuple[tuple[str, str], ...] = ()
    overlapped: bool = False


def read(text: str) -> Program:
    """Reads the HLO text of a compiled program.

    The loop over local steps is the largest of the loops that are in no other loop.
    """
    module = hlo_text.parse(text)
    sent = functools.cache(lambda name: _sent(name, module))
    steps = max(_outer_loops(module.entry, module), key=module.weight, default=None)

    def visit(name: str, place: _Place) -> Iterator[Collective]:
        lines = module.computations.get(name, [])
        for number, line in enumerate(lines):
            if one := sent(name).get(number):
                overlapped = one.overlapped or place.overlapped
                yield one._replace(**{**place._asdict(), "overlapped": overlapped})
            inside = place
            if line is steps:
                inside = place._replace(is_looped=True)
            elif line.opcode == "while":
                count = hlo_text.trips(line, module)
                inside = place._replace(
                    times=place.times * (1 if count is None else count)
                )
            elif line.opcode == "async-start":
                inside = place._replace(overlapped=_works_until_done(lines, number))
            for key, callee in line.called:
                is_branch = line.opcode == "conditional" and key != "to_apply"
                taken = ((line.name, callee),) if is_branch else ()
                choices = place.choices + taken
                yield from visit(callee, inside._replace(choices=choices))

    count = 1 if steps is None else hlo_text.trips(steps, module)
    return Program([*visit(module.entry, _Place())], count)


def _outer_loops(name: str, module: Module) -> Iterator[Instruction]:
    """Yields the loops that a computation leads to and that are in no other loop."""
    for line in module.computations.get(name, []):
        if line.opcode == "while":
            yield line
        else:
            for _, callee in line.called:
                yield from _outer_loops(callee, module)


def _sent(name: str, module: Module) -> dict[int, Collective]:
    """Returns the collectives of a computation by line number, as if it ran once.

    Between slices, it counts the bytes that a device hands to its host. If all slices
    reduce an array, the hosts send it over the network, which is assumed to be by
    rings.
    """
    lines = module.computations[name]
    types = {x.name: x.type for x in lines}
    is_start = any('"AsyncCollectiveStart"' in x.rest for x in lines)
    collectives = {}
    for number, line in enumerate(lines):
        slices = line.opcode == "send" and "_xla_megascale_transfer_type" in line.rest
        if slices:
            kind, groups = hlo_text.slice_kind(line), hlo_text.slice_groups(line.rest)
        elif kind := KINDS.get(line.opcode.removesuffix("-start")):
            groups = hlo_text.groups(line.rest, module.devices)
            # An earlier TPU fusion has started it.
            if "async_collective_fusion_config" in line.rest and not is_start:
                continue
        else:
            continue
        if kind == "all_reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        operands = [types[x] for x in line.operands if not types[x].startswith("token")]
        share = hlo_text.share(kind, len(groups[0]))
        collectives[number] = Collective(
            kind,
            share * sum(map(hlo_text.size, operands)),
            groups,
            hlo_text.dtypes(operands),
            overlapped=is_start or _works_until_done(lines, number),
            slices=slices,
            promoted=not slices and "_promoted" in line.rest.partition("metadata=")[0],
        )
    return collectives


def _works_until_done(lines: list[Instruction], place: int) -> bool:
    """Whether any instruction between a start and its done computes."""
    start = lines[place]
    # With is_sync, a GPU's stream waits at the start itself.
    is_start = start.opcode.endswith("-start") or start.opcode == "send"
    if not is_start or '"is_sync":true' in start.rest:
        return False
    done, names = start.opcode.removesuffix("-start") + "-done", {start.name}
    if start.opcode == "send":  # between slices, the matching recv has the same name
        key = "_xla_host_transfer_rendezvous"
        meeting = [x for x in lines if x.attribute(key) == start.attribute(key)]
        done, names = "recv-done", {x.name for x in meeting if x.opcode == "recv"}
    for line in lines[place + 1 :]:
        if line.opcode == done and names & {*line.operands}:
            return False
        if line.opcode.endswith("-update") and names & {*line.operands}:
            names.add(line.name)
        background = line.opcode.endswith(("-start", "-done", "-update"))
        if line.opcode not in _IDLE and not background and line.opcode not in KINDS:
            return True
    return False
