"""The collectives of a compiled program, read from its HLO text.

Programs for CPUs, TPUs and GPUs have the same form, except for operations in the
background:

- GPUs: `all-reduce-start` and `all-reduce-done`, and so on for all kinds;
- TPUs: the same for permutations; other collectives are spread over fusions, from one
  with `AsyncCollectiveStart` to one with `AsyncCollectiveDone`, and appear in each;
- TPUs: a reduce-scatter is a fusion of an all-reduce and a slice of it;
- TPUs of several slices: the program is for one slice, and refers to the others only as
  hosts, by `send` and `recv` to `xla_megascale_runtime`.

Nothing here uses jax.
"""

import functools
import math
import re
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import NamedTuple

import numpy as np

# The ledger's names of HLO's collectives, and of transfers between TPU slices.
KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "reduce-scatter": "reduce_scatter",
    "collective-permute": "permute",
    "collective-broadcast": "permute",
}
SLICE_KINDS = {"ONE_TO_ONE": "permute", **{x.upper(): x for x in KINDS.values()}}
SLICE = 100_000  # the device ids of slice n, from 1, start at n times this number
# Instructions that do not compute: they only name, move or send data.
_IDLE = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast", "copy"}
_IDLE |= {"after-all", "opt-barrier", "partition-id", "replica-id", "send", "recv"}
_IDLE |= {*KINDS}
# Bits of the types whose names do not contain them.
BITS = {"pred": 8, "token": 0, "bf16": 16, "c64": 64, "c128": 128}
_HEAD = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\((.*)$")
_SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_WHOLE = re.compile(r"[su]\d+\[\]")
_CALLS = re.compile(
    r"\b(to_apply|body|condition|calls|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        name: its name within the computation.
        type: the type of its result, as in the text.
        opcode: the operation, such as "all-reduce" or "fusion".
        rest: its operands and attributes, as in the text.
    """

    name: str
    type: str
    opcode: str
    rest: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        inside = re.split(r"\), |\)$", self.rest, maxsplit=1)[0]
        return re.findall(r"%([\w.\-]+)", inside)

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls: (attribute, name)."""
        return [
            (key, name)
            for key, names in _CALLS.findall(self.rest)
            for name in re.findall(r"[\w.\-]+", names)
        ]

    def attribute(self, key: str) -> str | None:
        """Returns the text in quotes after `key=` or `"key":`."""
        found = re.search(rf'\b{key}"?[=:]"([^"]*)"', self.rest)
        return found[1] if found else None


class Module(NamedTuple):
    """A program's computations.

    Attributes:
        computations: instructions by the name of their computation, in order.
        entry: the name of the first computation to run.
        devices: number of devices on which it runs.
    """

    computations: dict[str, list[Instruction]]
    entry: str
    devices: int

    def reached(self, names: Iterable[str]) -> list[Instruction]:
        """Returns the instructions of computations and of those that they call."""
        found = []
        for name in names:
            for line in self.computations.get(name, []):
                found += [line, *self.reached(callee for _, callee in line.called)]
        return found


def parse(text: str) -> Module:
    """Returns the computations of an HLO text."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    here = []
    lines = text.splitlines()
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", "".join(lines[:1]))
    for line in lines:
        found = _LINE.match(line)
        if found:
            here.append(Instruction(*found.groups()))
        elif head := _HEAD.match(line):
            here = computations[head[2]] = []
            entry = head[2] if head[1] else entry
    return Module(computations, entry, math.prod(map(int, counts)))


def size(type_: str) -> int:
    """Returns the bytes of a type, summed over a tuple; layouts add none."""
    total = 0
    for dtype, dims in _SHAPE.findall(type_):
        named = re.fullmatch(r"(?:f|s|u)(\d+)\w*", dtype)
        if named is None and dtype not in BITS:
            raise ValueError(f"HLO: unknown type {dtype!r}")
        bits = int(named[1]) if named else BITS[dtype]
        total += math.ceil(bits * math.prod(map(int, re.findall(r"\d+", dims))) / 8)
    return total


def dtypes(types: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the element types of all arrays, each once."""
    return tuple(dict.fromkeys(x for t in types for x, _ in _SHAPE.findall(t)))


def groups(rest: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that take part together; pairs of a permutation.

    Args:
        rest: the operands and attributes of the instruction.
        devices: number of devices of the program, one group if the text has no groups.
    """
    lists = r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}"
    mesh = r"replica_groups=mesh\[(.*?)\] \{(.*?)\}"
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    named = re.search(lists, rest)
    if named:
        return [_numbers(x) for x in re.findall(r"\{([\d,]+)\}", named[1])]
    named = re.search(mesh, rest)
    if named:  # such as mesh['x'=2,'y'=4] {'y'}
        sizes = {name: int(n) for name, n in re.findall(r"'(\w+)'=(\d+)", named[1])}
        shape = [*sizes.values()]
        names = [*sizes]
        last = [names.index(x) for x in re.findall(r"'(\w+)'", named[2])]
        order = [i for i in range(len(names)) if i not in last] + last
        length = math.prod(shape[i] for i in last)
    elif named := re.search(iota, rest):  # such as [4,2]<=[2,4]T(1,0)
        shape = _numbers(named[2])
        length = _numbers(named[1])[-1]
        order = _numbers(named[3]) if named[3] else range(len(shape))
    else:
        return [[*range(devices)]]
    positions = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    return positions.reshape(-1, length).tolist()


def slice_groups(rest: str) -> list[list[int]]:
    """Returns the ids of the devices that exchange between TPU slices.

    The text has them as lists, {{100000,200000},{100001,200001}}; as pairs,
    {{200000->100015},{100000->200015}}; or as a product, "{1,2}x{0:15}", which groups
    devices with the same number in several slices. The first slice is 1; its device 3
    has the id 100003.
    """
    target = rest.partition("_xla_megascale_target=")[2]
    if target.startswith("{{"):
        lists = re.findall(r"\{([\d,\->]+)\}", target.partition("}}")[0] + "}")
        return [[int(n) for n in re.findall(r"\d+", x)] for x in lists]
    products = re.findall(r"\{([\d,:]+)\}x\{([\d,:]+)\}", target[1:].partition('"')[0])
    if not products:
        raise ValueError(f"HLO: unknown target between slices {target[:80]!r}")
    return [
        [SLICE * number + device for number in _numbers(slices)]
        for slices, devices in products
        for device in _numbers(devices)
    ]


def _numbers(text: str) -> list[int]:
    """The numbers of "0:3,8"."""
    ends = [[int(n) for n in part.split(":")] for part in text.split(",")]
    return [n for first, *last in ends for n in range(first, (last or [first])[0] + 1)]


def trips(loop: Instruction, module: Module) -> int:
    """Returns how often a while loop's body runs; 1 if its text does not tell it.

    A loop counts from 0, as those of `lax.scan` do, and as XLA makes them.
    """
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.rest)
    if known:
        return int(known[1])
    # TPU programs do not have it: there the condition compares with a constant.
    lines = module.reached(name for key, name in loop.called if key == "condition")
    constants = [x for x in lines if x.opcode == "constant" and _WHOLE.match(x.type)]
    bounds = {int(n) for x in constants for n in re.findall(r"^(\d+)\)", x.rest)}
    compares = [x.rest for x in lines if x.opcode == "compare"]
    if len(bounds) != 1 or len(compares) != 1:
        return 1
    below = re.search(r"direction=(LT|LE)\b", compares[0])
    return bounds.pop() + (below[1] == "LE") if below else 1


def share(kind: str, members: int) -> Fraction:
    """Returns the part of its operand that each device sends, by rings.

    N members: 2 (N-1)/N of an all-reduce, (N-1)/N of a reduce-scatter and an
    all-to-all, N-1 times the part that it gives to an all-gather, a permutation once.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005.
    """
    others = members - 1
    if kind == "all_gather":
        return Fraction(others)
    if kind == "permute":
        return Fraction(1)
    return Fraction(others * (2 if kind == "all_reduce" else 1), members)


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


def read(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, in order, from its HLO text.

    The loop over local steps is the largest of the loops that are in no other loop.
    """
    module = parse(text)

    def weight(loop: Instruction) -> int:
        return len(module.reached(name for _, name in loop.called))

    steps = max(_outer_loops(module.entry, module), key=weight, default=None)

    @functools.cache
    def found(name: str) -> list[Collective]:
        """Returns the collectives of a computation and of those that it calls."""
        lines = module.computations.get(name, [])
        own = _sent(name, module)
        collectives = []
        for number, line in enumerate(lines):
            if number in own:
                collectives.append(own[number])
            is_inner = line.opcode == "while" and line is not steps
            times = trips(line, module) if is_inner else 1
            overlaps = line.opcode == "async-start" and _works_until_done(lines, number)
            for key, callee in line.called:
                is_branch = line.opcode == "conditional" and key != "to_apply"
                choice = ((line.name, callee),) if is_branch else ()
                for x in found(callee):
                    inside = x._replace(
                        is_looped=x.is_looped or line is steps,
                        times=x.times * times,
                        choices=choice + x.choices,
                        overlapped=x.overlapped or overlaps,
                    )
                    collectives.append(inside)
        return collectives

    return found(module.entry)


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
    lines = module.computations.get(name, [])
    types = {x.name: x.type for x in lines}
    is_start = any('"AsyncCollectiveStart"' in x.rest for x in lines)
    collectives = {}
    for number, line in enumerate(lines):
        slices = line.opcode == "send" and "_xla_megascale_transfer_type" in line.rest
        if slices:
            transfer = line.attribute("_xla_megascale_transfer_type") or ""
            kind = SLICE_KINDS.get(transfer)
            sharing = slice_groups(line.rest)
            if kind is None:
                raise ValueError(f"HLO: unknown transfer between slices {transfer!r}")
        elif kind := KINDS.get(line.opcode.removesuffix("-start")):
            sharing = groups(line.rest, module.devices)
            # An earlier TPU fusion has started it.
            if "async_collective_fusion_config" in line.rest and not is_start:
                continue
        else:
            continue
        if kind == "all_reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        operands = [types[x] for x in line.operands if not types[x].startswith("token")]
        collectives[number] = Collective(
            kind,
            share(kind, len(sharing[0])) * sum(map(size, operands)),
            sharing,
            dtypes(operands),
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
    done = start.opcode.removesuffix("-start") + "-done"
    names = {start.name}
    if start.opcode == "send":  # between slices, the matching recv has the same name
        key = "_xla_host_transfer_rendezvous"
        meeting = [x for x in lines if x.attribute(key) == start.attribute(key)]
        done = "recv-done"
        names = {x.name for x in meeting if x.opcode == "recv"}
    for line in lines[place + 1 :]:
        if line.opcode == done and names & {*line.operands}:
            return False
        if line.opcode.endswith("-update") and names & {*line.operands}:
            names.add(line.name)
        is_background = line.opcode.endswith(("-start", "-done", "-update"))
        if not is_background and line.opcode not in _IDLE:
            return True
    return False
