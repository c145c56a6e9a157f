"""The collectives of a compiled program, as its HLO text tells them."""

import math
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np

KINDS = {
    "all-reduce": ("all_reduce", lambda n, size: Fraction(2 * (n - 1), n) * size),
    "all-gather": ("all_gather", lambda n, size: Fraction(n - 1, n) * size),
    "all-to-all": ("all_to_all", lambda n, size: Fraction(n - 1, n) * size),
    "reduce-scatter": ("reduce_scatter", lambda n, size: Fraction(n - 1) * size),
    "collective-permute": ("permute", lambda n, size: Fraction(size)),
}
SIZES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
SIZES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}


class Sent(NamedTuple):
    """A collective.

    Attributes:
        kind: as the ledger names it.
        bytes: that each device sends by rings.
        groups: of the numbers of the devices that take part together.
        computation: the name of the computation that it is in.
    """

    kind: str
    bytes: Fraction
    groups: list[list[int]]
    computation: str


class Program(NamedTuple):
    """A compiled program.

    Attributes:
        sent: its collectives.
        entry: the name of the computation that it begins with.
        conditional: the names of all computations that only a branch calls.
    """

    sent: list[Sent]
    entry: str
    conditional: set[str]


def read(text: str) -> Program:
    """Reads the HLO text of a compiled program."""
    sent, entry, here, calls, branches = [], "", "", {}, set()
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
            here, calls[head[2]] = head[2], set()
            entry = head[2] if head[1] else entry
            continue
        names = set(re.findall(r"%?([\w.\-]+)", " ".join(_called(line))))
        if " conditional(" in line:
            branches |= names
        else:
            calls.setdefault(here, set()).update(names)
        if found := _collective(line, here):
            sent.append(found)
    while more := {x for name in branches for x in calls.get(name, ())} - branches:
        branches |= more
    return Program(sent, entry, branches)


def _called(line: str) -> list[str]:
    """The names of computations that an instruction calls."""
    one = re.findall(r"(?:to_apply|body|condition|calls|\w+_computation)=(\S+)", line)
    return [*one, *re.findall(r"(?:branch|called)_computations=\{([^}]*)\}", line)]


def _collective(line: str, computation: str) -> Sent | None:
    names = "|".join(KINDS)
    found = re.search(rf"= (\(.*?\)|\S+) ({names})(-start)?\(", line)
    if found is None:
        return None
    kind, share = KINDS[found[2]]
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", found[1])
    size = sum(
        SIZES[dtype] * math.prod(int(n) for n in dims.split(",") if n)
        for dtype, dims in shapes
    )
    groups = _groups(line)
    return Sent(kind, share(len(groups[0]), size), groups, computation)


def _groups(line: str) -> list[list[int]]:
    if pairs := re.search(r"source_target_pairs=\{(\{.*?\})\}", line):
        return [[int(n) for n in x.split(",")] for x in _braces(pairs[1])]
    if lists := re.search(r"replica_groups=\{(\{.*?\})\}", line):
        return [[int(n) for n in x.split(",")] for x in _braces(lists[1])]
    if mesh := re.search(r"replica_groups=mesh\[(.*?)\] \{(.*?)\}", line):
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = [[*sizes].index(name) for name in re.findall(r"'(\w+)'", mesh[2])]
        numbers = np.arange(math.prod(sizes.values())).reshape([*sizes.values()])
        last = np.moveaxis(numbers, axes, range(-len(axes), 0))
        return last.reshape(-1, math.prod(last.shape[-len(axes) :])).tolist()
    iota = re.search(
        r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line
    )
    assert iota is not None, line
    shape, source = ([int(n) for n in x.split(",")] for x in iota.groups()[:2])
    numbers = np.arange(math.prod(source)).reshape(source)
    if iota[3]:
        numbers = numbers.transpose([int(n) for n in iota[3].split(",")])
    return numbers.reshape(shape).tolist()


def _braces(text: str) -> list[str]:
    return re.findall(r"\{([\d,]+)\}", text)
