"""Compiles one algorithm for one target, and reads the program."""

import math
import re
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core

from experiments.aim import hlo, targets, times
from experiments.aim.targets import Target
from experiments.command.errors import refusing
from experiments.data import feeding
from experiments.tasks.task import Data
from experiments.training import sends
from experiments.training.config import RunConfig, Settings
from experiments.training.loop import dispatches
from experiments.training.machine import versions
from experiments.training.plan import Plan, check_data, make_plan
from experiments.training.prepare import refused
from experiments.training.summary import delay_of_sends
from syncalgos import Lowered, TrainState, checks, network

LEAVES = 8  # number of the largest leaves to list
# Memory of a chip, by jax's names.
MEMORY = {"arguments": "argument", "outputs": "output", "aliased": "alias"}
MEMORY |= {"temporary": "temp", "code": "generated_code"}


def compiled(config: RunConfig, target: Target) -> dict[str, Any]:
    """Compiles the local steps of a run, and returns the findings in the program.

    Args:
        config: the config of the run; its workers take all chips of the target.
        target: the machine.

    Returns:
        The findings as JSON, without any modelled values.

    Raises:
        BadRequest: the run is not possible; one line.
    """
    # No more than the workers need: a CPU may have any number of virtual devices.
    devices = targets.devices(target)[: config.workers * config.worker_devices]
    with refusing():
        machines = len({targets.place_of(device) for device in devices})
        parts = make_plan(config, machines, devices)
        data = _data(parts)
        check_data(parts.config, data, config.batch_size is not None)
    lowered = _lower(parts, data)
    return {
        **_facts(parts, lowered, target),
        **_sent(parts, lowered.state),
        **_compile(parts, lowered),
    }


def _data(parts: Plan) -> Data:
    """Returns the task's data, which is read only if its shapes are not declared."""
    c = parts.config
    blank = parts.task.blank
    if blank is not None and c.validation is None:
        return blank()
    return feeding.load(parts.task.load, c.task, c.validation)


def longest(config: Settings) -> int:
    """Returns the local steps of a run's longest dispatch."""
    ends = {*config.evaluations, *config.checkpoints}
    return max(steps for _, steps in dispatches(ends, config.dispatch_steps))


def steps_of(config: Settings) -> int:
    """Returns the local steps that are compiled, at least two.

    With a single step the compiler removes the loop, by which local steps are found.
    """
    return max(2, longest(config))


def _lower(parts: Plan, data: Data) -> Lowered:
    """Lowers the run program from shapes only."""
    c = parts.config
    with refused("task", c.task):
        params, buffers = jax.eval_shape(parts.task.init, jax.random.key(c.seed))
        if c.mesh is not None:
            parts.trainer.shardings(params)
    batches, placed = _fed(c, data)
    with refused("algo", c.algo):
        return parts.trainer.lower(params, batches, buffers, placed)


def _fed(config: Settings, data: Data) -> tuple[Any, Any]:
    """Returns the shapes of batches, and of resident data on the devices or None."""
    lead = (steps_of(config), config.batch_size)
    train = data.train
    # An entry of a one-dimensional array is a NumPy scalar, which has both, too.
    one = {k: x[0] for k, x in train.items()} if isinstance(train, dict) else train[0]

    def led_by(*axes: int) -> dict[str, jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), one
        )

    if feeding.is_read_on_host(data):
        return led_by(*lead), None
    return jax.ShapeDtypeStruct(lead, np.int32), led_by(data.examples)


def _facts(parts: Plan, lowered: Lowered, target: Target) -> dict[str, Any]:
    """Returns the facts that are known before the target's compiler runs."""
    c = parts.config
    layout = parts.trainer.layout
    state = lowered.state
    found = flops(lowered.jaxpr)
    steps = steps_of(c)
    each = steps * layout.devices_each
    # Only syncs have branches: the larger branches add the operations of syncs.
    of_syncs = found.most - found.least
    params = jax.tree.leaves(state.replica.params)
    return {
        "slices": target.slices,
        "workers": c.workers,
        "mesh": dict(layout.inner),
        "lanes": layout.lanes,
        "lane_form": parts.trainer.lane_form,
        "batch_size": c.batch_size,
        "steps": c.steps,
        "dispatch_steps": longest(c),
        "params": sum(math.prod(x.shape[2:]) for x in params),
        "flops": {"step": found.least / each, "sync": of_syncs / each},
        "state": sends.device_bytes(state),
        "largest": _largest(state),
        "delay": delay_of_sends(c, parts.task, parts.method.algorithm),
        "versions": {**versions(), **targets.compiler_version(target)},
    }


def _largest(state: TrainState) -> list[dict[str, Any]]:
    """Returns the leaves that take the most memory of a chip, the largest first."""
    leaves = []
    for part, tree in {**state.replica._asdict(), "sync": state.sync}.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = checks.leaf_name(path)
            shape = x.sharding.shard_shape(x.shape)
            size = math.prod(shape) * x.dtype.itemsize
            leaves.append({"name": f"{part}/{name}", "shape": [*shape], "bytes": size})
    return sorted(leaves, key=lambda x: -x["bytes"])[:LEAVES]


def _sent(parts: Plan, state: TrainState) -> dict[str, Any]:
    """Returns the ledger's counts per device; None where only a run can tell them."""
    try:
        of_program = parts.trainer.program_sends(state)
    except ValueError as error:
        return {"ledger": None, "sends": None, "uncounted": str(error)}
    ledger = {
        name: {collective: [*counts] for collective, counts in kind.items()}
        for name, kind in of_program._asdict().items()
    }
    try:
        of_run = parts.trainer.communication(state, parts.config.steps)
    except ValueError:  # the sends depend on the data, but the ledger has each branch
        return {"ledger": ledger, "sends": None}
    kinds, of_steps = network.sends(of_run)
    # The counts are per worker; here they are per device, like those of the program.
    each = [
        {name: (size / of_run.devices, calls) for name, (size, calls) in kind.items()}
        for kind in kinds
    ]
    return {"ledger": ledger, "sends": sends.to_json(network.Sends(each, of_steps))}


def _compile(parts: Plan, lowered: Lowered) -> dict[str, Any]:
    """Calls the target's compiler, and returns the findings in its program."""
    start = time.perf_counter()
    layout = parts.trainer.layout
    try:
        program, text = program_of(lowered.program)
    except jax.errors.JaxRuntimeError as error:
        return {
            "compile_seconds": time.perf_counter() - start,
            "refused": str(error),
            "needed": memory_needed(error),
            "traffic": None,
        }
    seconds = time.perf_counter() - start
    found = program.memory_analysis()
    if found is not None:
        found = {k: getattr(found, f"{x}_size_in_bytes") for k, x in MEMORY.items()}
    return {
        "compile_seconds": seconds,
        "memory": found,
        "traffic": times.traffic(hlo.read(text), layout.devices, layout.devices_each),
    }


def program_of(lowered: Any) -> tuple[Any, str]:
    """Compiles a jax.stages.Lowered; returns a jax.stages.Compiled and its HLO text.

    Raises:
        jax.errors.JaxRuntimeError: the compiler fails; see `memory_needed`.
    """
    program = lowered.compile()
    try:
        return program, program.as_text()
    except jax.errors.JaxRuntimeError as error:
        # A libtpu newer than jaxlib uses instructions that jaxlib cannot read, such as
        # gathers on the sparse cores of v5p; libtpu can write them to a file itself.
        if "RET_CHECK" not in str(error):
            raise
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        program = lowered.compile(compiler_options=options)
        [file] = Path(folder).glob("*.after_optimizations.txt")
        return program, file.read_text("utf-8")


def memory_needed(error: BaseException) -> int | None:
    """Returns the bytes that a program needs on a chip; None if the error has none.

    The TPU compiler refuses programs that do not fit; the GPU compiler compiles them.
    """
    amounts = re.findall(r"\(([\d.]+)([KMGT])\)", str(error).partition("HLO module")[0])
    if "RESOURCE_EXHAUSTED" not in str(error) or len(amounts) != 2:
        return None
    units = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    number, unit = amounts[0]  # the second one is what the chip has
    return int(float(number) * units[unit])


class Flops(NamedTuple):
    """The operations of products and convolutions.

    Attributes:
        least: number if every condition takes the branch with the fewest operations.
        most: number if every condition takes the branch with the most operations.
    """

    least: float = 0.0
    most: float = 0.0


def flops(jaxpr: Any) -> Flops:
    """Counts the operations of a jaxpr: 2 for each multiplication and its addition.

    Loops count as often as they run, or once if their length is unknown. Recomputation
    in a gradient counts again. Elementwise operations are left out, because memory
    bounds their speed.

    Args:
        jaxpr: a jaxpr, closed or not.
    """
    found = [_of_equation(x) for x in getattr(jaxpr, "jaxpr", jaxpr).eqns]
    return Flops(sum(x.least for x in found), sum(x.most for x in found))


def _of_equation(equation: Any) -> Flops:
    """Counts one equation, with what it calls."""
    name = equation.primitive.name
    params = equation.params
    count = _PRODUCTS.get(name)
    if count:
        operations = count(equation)
        return Flops(operations, operations)
    inner = [flops(x) for x in core.jaxprs_in_params(params)]
    least = [x.least for x in inner]
    most = [x.most for x in inner]
    if name == "cond":
        return Flops(min(least), max(most))
    times = params.get("length", 1) if name == "scan" else 1
    return Flops(times * sum(least), times * sum(most))


def _of_dot(equation: Any) -> float:
    """Returns twice the entries of the result times the contracted ones."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)


def _of_convolution(equation: Any) -> float:
    """Returns twice the entries of the result times the kernel's for one feature."""
    kernel = equation.invars[1].aval.shape
    numbers = equation.params
    features = kernel[numbers["dimension_numbers"].rhs_spec[0]]
    # The kernel's inputs are already per group. The strides of a gradient put zeros
    # between the entries, which are not counted.
    each = math.prod(kernel) / features / math.prod(numbers["lhs_dilation"])
    return 2.0 * equation.outvars[0].aval.size * each


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _of_dot,
    "conv_general_dilated": _of_convolution,
}
