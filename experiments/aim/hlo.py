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
_INTEGER = re.compile(r"[su]\d+\[\]")
_CALLS = re.compile(
    r"\b(to_apply|body|condition|calls|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
)


class Instruction(NamedTuple):
    """An instruction.

    Attributes:
        name: its name within the computation.
        type: the type of its result, as in the text.
        opcode: the operation, such as "all-reduce" or "fusion".
        arguments: its operands and attributes, as in the text.
    """

    name: str
    type: str
    opcode: str
    arguments: str

    @property
    def operands(self) -> list[str]:
        """The names of its operands."""
        operands = re.split(r"\), |\)$", self.arguments, maxsplit=1)[0]
        return re.findall(r"%([\w.\-]+)", operands)

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls: (attribute, name)."""
        pairs = []
        for key, names in _CALLS.findall(self.arguments):
            pairs += [(key, name) for name in re.findall(r"[\w.\-]+", names)]
        return pairs

    def attribute(self, key: str) -> str | None:
        """Returns the text in quotes after `key=` or `"key":`."""
        match = re.search(rf'\b{key}"?[=:]"([^"]*)"', self.arguments)
        return match[1] if match else None


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

    def list_instructions(self, names: Iterable[str]) -> list[Instruction]:
        """Returns the instructions of computations and of those that they call."""
        instructions = []
        for name in names:
            for line in self.computations.get(name, []):
                callees = [callee for _, callee in line.called]
                instructions += [line, *self.list_instructions(callees)]
        return instructions


def parse_module(text: str) -> Module:
    """Returns the computations of an HLO text."""
    computations: dict[str, list[Instruction]] = {}
    entry = ""
    computation: list[Instruction] = []
    lines = text.splitlines()
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", "".join(lines[:1]))
    for line in lines:
        instruction = _LINE.match(line)
        head = _HEAD.match(line)
        if instruction:
            computation.append(Instruction(*instruction.groups()))
        elif head:
            computation = []
            computations[head[2]] = computation
            if head[1]:
                entry = head[2]
    return Module(computations, entry, math.prod(map(int, counts)))


def count_type_bytes(type_: str) -> int:
    """Returns the bytes of a type, summed over a tuple; layouts add none."""
    total = 0
    for dtype, dims in _SHAPE.findall(type_):
        number_type = re.fullmatch(r"(?:f|s|u)(\d+)\w*", dtype)
        if number_type is None and dtype not in BITS:
            raise ValueError(f"HLO: unknown type {dtype!r}")
        bits = int(number_type[1]) if number_type else BITS[dtype]
        total += math.ceil(bits * math.prod(map(int, re.findall(r"\d+", dims))) / 8)
    return total


def dtypes(types: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of the element types of all arrays, each once."""
    shapes = _SHAPE.findall(" ".join(types))
    return tuple(dict.fromkeys(dtype for dtype, _ in shapes))


def groups(arguments: str, devices: int) -> list[list[int]]:
    """Returns the groups of devices that take part together; pairs of a permutation.

    Args:
        arguments: the operands and attributes of the instruction.
        devices: number of devices of the program, one group if the text has no groups.
    """
    lists = r"(?:source_target_pairs|replica_groups)=\{(\{.*?\})\}"
    mesh = r"replica_groups=mesh\[(.*?)\] \{(.*?)\}"
    iota = r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?"
    list_match = re.search(lists, arguments)
    mesh_match = re.search(mesh, arguments)
    iota_match = re.search(iota, arguments)
    if list_match:
        return [_numbers(x) for x in re.findall(r"\{([\d,]+)\}", list_match[1])]
    if mesh_match:  # such as mesh['x'=2,'y'=4] {'y'}
        axes = re.findall(r"'(\w+)'=(\d+)", mesh_match[1])
        names = [name for name, _ in axes]
        shape = [int(size) for _, size in axes]
        group_axes = [names.index(x) for x in re.findall(r"'(\w+)'", mesh_match[2])]
        order = [i for i in range(len(names)) if i not in group_axes] + group_axes
        length = math.prod(shape[i] for i in group_axes)
    elif iota_match:  # such as [4,2]<=[2,4]T(1,0)
        shape = _numbers(iota_match[2])
        length = _numbers(iota_match[1])[-1]
        order = [*range(len(shape))]
        if iota_match[3]:
            order = _numbers(iota_match[3])
    else:
        return [[*range(devices)]]
    positions = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    return positions.reshape(-1, length).tolist()


def slice_groups(arguments: str) -> list[list[int]]:
    """Returns the ids of the devices that exchange between TPU slices.

    The text has them as lists, {{100000,200000},{100001,200001}}; as pairs,
    {{200000->100015},{100000->200015}}; or as a product, "{1,2}x{0:15}", which groups
    devices with the same number in several slices. The first slice is 1; its device 3
    has the id 100003.
    """
    target = arguments.partition("_xla_megascale_target=")[2]
    if target.startswith("{{"):
        lists = re.findall(r"\{([\d,\->]+)\}", target.partition("}}")[0] + "}")
        return [_all_numbers(x) for x in lists]
    products = re.findall(r"\{([\d,:]+)\}x\{([\d,:]+)\}", target[1:].partition('"')[0])
    if not products:
        raise ValueError(f"HLO: unknown target between slices {target[:80]!r}")
    id_groups = []
    for slices, devices in products:
        for device in _numbers(devices):
            ids = [SLICE * number + device for number in _numbers(slices)]
            id_groups.append(ids)
    return id_groups


def _all_numbers(text: str) -> list[int]:
    """Returns the numbers of "100000->100001"."""
    return [int(digits) for digits in re.findall(r"\d+", text)]


def _numbers(text: str) -> list[int]:
    """Returns the numbers of "0:3,8": 0 to 3, and 8."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = _all_numbers(part)
        numbers += range(ends[0], ends[-1] + 1)
    return numbers


def trips(loop: Instruction, module: Module) -> int:
    """Returns how often a while loop's body runs; 1 if its text does not tell it.

    A loop counts from 0, as those of `lax.scan` do, and as XLA makes them.
    """
    trip_count = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.arguments)
    if trip_count:
        return int(trip_count[1])
    # TPU programs do not have it: there the condition compares with a constant.
    conditions = [name for key, name in loop.called if key == "condition"]
    bounds: set[int] = set()
    comparisons = []
    for line in module.list_instructions(conditions):
        value = re.match(r"(\d+)\)", line.arguments)
        if value and line.opcode == "constant" and _INTEGER.match(line.type):
            bounds.add(int(value[1]))
        elif line.opcode == "compare":
            comparisons.append(line.arguments)
    if len(bounds) != 1 or len(comparisons) != 1:
        return 1
    direction = re.search(r"direction=(LT|LE)\b", comparisons[0])
    if not direction:
        return 1
    return bounds.pop() + (direction[1] == "LE")


def share(kind: str, members: int) -> Fraction:
    """Returns the part of its operand that each device sends, by rings.

    N members: 2 (N-1)/N of an all-reduce, (N-1)/N of a reduce-scatter and an
    all-to-all, N-1 times the part that it gives to an all-gather, a permutation once.

    Source: Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005.
    """
    num_peers = members - 1
    if kind == "all_gather":
        return Fraction(num_peers)
    if kind == "permute":
        return Fraction(1)
    if kind == "all_reduce":
        num_peers *= 2
    return Fraction(num_peers, members)


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


def find_collectives(text: str) -> list[Collective]:
    """Returns the collectives of a compiled program, in order, from its HLO text.

    The loop over local steps is the largest of the loops that are in no other loop.
    """
    module = parse_module(text)

    def weight(loop: Instruction) -> int:
        return len(module.list_instructions(name for _, name in loop.called))

    steps = max(_outer_loops(module.entry, module), key=weight, default=None)

    @functools.cache
    def of_computation(name: str) -> list[Collective]:
        """Returns the collectives of a computation and of those that it calls."""
        lines = module.computations.get(name, [])
        own_collectives = _own_collectives(name, module)
        collectives = []
        for number, line in enumerate(lines):
            if number in own_collectives:
                collectives.append(own_collectives[number])
            is_inner = line.opcode == "while" and line is not steps
            times = trips(line, module) if is_inner else 1
            overlaps = line.opcode == "async-start" and _works_until_done(lines, number)
            for key, callee in line.called:
                is_branch = line.opcode == "conditional" and key != "to_apply"
                choice = ((line.name, callee),) if is_branch else ()
                for x in of_computation(callee):
                    collective = x._replace(
                        is_looped=x.is_looped or line is steps,
                        times=x.times * times,
                        choices=choice + x.choices,
                        overlapped=x.overlapped or overlaps,
                    )
                    collectives.append(collective)
        return collectives

    return of_computation(module.entry)


def _outer_loops(name: str, module: Module) -> Iterator[Instruction]:
    """Yields the loops that a computation leads to and that are in no other loop."""
    for line in module.computations.get(name, []):
        if line.opcode == "while":
            yield line
        else:
            for _, callee in line.called:
                yield from _outer_loops(callee, module)


def _own_collectives(name: str, module: Module) -> dict[int, Collective]:
    """Returns the collectives of a computation by line number, as if it ran once.

    Between slices, it counts the bytes that a device hands to its host. If all slices
    reduce an array, the hosts send it over the network, which is assumed to be by
    rings.
    """
    lines = module.computations.get(name, [])
    types = {x.name: x.type for x in lines}
    is_start = any('"AsyncCollectiveStart"' in x.arguments for x in lines)
    collectives = {}
    for number, line in enumerate(lines):
        slices = (
            line.opcode == "send" and "_xla_megascale_transfer_type" in line.arguments
        )
        if slices:
            transfer = line.attribute("_xla_megascale_transfer_type") or ""
            kind = SLICE_KINDS.get(transfer)
            sharing = slice_groups(line.arguments)
            if kind is None:
                raise ValueError(f"HLO: unknown transfer between slices {transfer!r}")
        else:
            kind = KINDS.get(line.opcode.removesuffix("-start"))
            if kind is None:
                continue
            sharing = groups(line.arguments, module.devices)
            # An earlier TPU fusion has started it.
            if "async_collective_fusion_config" in line.arguments and not is_start:
                continue
        if kind == "all_reduce" and name.startswith("all-reduce-scatter"):
            kind = "reduce_scatter"
        operands = [types[x] for x in line.operands if not types[x].startswith("token")]
        collectives[number] = Collective(
            kind,
            share(kind, len(sharing[0])) * sum(map(count_type_bytes, operands)),
            sharing,
            dtypes(operands),
            overlapped=is_start or _works_until_done(lines, number),
            slices=slices,
            promoted=not slices
            and "_promoted" in line.arguments.partition("metadata=")[0],
        )
    return collectives


def _works_until_done(lines: list[Instruction], place: int) -> bool:
    """Whether any instruction between a start and its done computes."""
    start = lines[place]
    # With is_sync, a GPU's stream waits at the start itself.
    is_start = start.opcode.endswith("-start") or start.opcode == "send"
    if not is_start or '"is_sync":true' in start.arguments:
        return False
    done_opcode = start.opcode.removesuffix("-start") + "-done"
    names = {start.name}
    if start.opcode == "send":  # between slices, the matching recv has the same name
        key = "_xla_host_transfer_rendezvous"
        meeting = [x for x in lines if x.attribute(key) == start.attribute(key)]
        done_opcode = "recv-done"
        names = {x.name for x in meeting if x.opcode == "recv"}
    for line in lines[place + 1 :]:
        if line.opcode == done_opcode and names & {*line.operands}:
            return False
        if line.opcode.endswith("-update") and names & {*line.operands}:
            names.add(line.name)
        is_background = line.opcode.endswith(("-start", "-done", "-update"))
        if not is_background and line.opcode not in _IDLE:
            return True
    return False
