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
from experiments.aim.answer import (
    Counts,
    Findings,
    Ledger,
    Memory,
    StateArray,
    StepFlops,
    TrafficRow,
)
from experiments.aim.targets import Target
from experiments.command.errors import refusing
from experiments.data import feeding
from experiments.tasks.task import Data
from experiments.training import sends
from experiments.training.config import RunConfig, Settings
from experiments.training.loop import dispatches
from experiments.training.machine import versions
from experiments.training.plan import RunPlan, check_data, make_plan
from experiments.training.prepare import convert_errors
from experiments.training.summary import delay_of_sends
from syncalgos import Lowered, TrainState, checks, network

LEAVES = 8  # number of the largest leaves to list


def compile_run(config: RunConfig, target: Target) -> Findings:
    """Compiles the local steps of a run, and returns the findings in the program.

    Args:
        config: the config of the run; its workers take all chips of the target.
        target: the machine.

    Raises:
        BadRequest: the run is not possible; one line.
    """
    # No more than the workers need: a CPU may have any number of virtual devices.
    devices = targets.devices(target)[: config.workers * config.worker_devices]
    with refusing():
        machines = len({targets.device_place(device) for device in devices})
        plan = make_plan(config, machines, devices)
        data = _read_data(plan)
        check_data(plan.config, data, config.batch_size is not None)
    lowered = _lower(plan, data)
    settings = plan.config
    layout = plan.trainer.layout
    state = lowered.state
    params = jax.tree.leaves(state.replica.params)
    counts = _count_sends(plan, state)
    compilation = _compile(plan, lowered)
    return Findings(
        slices=target.slices,
        workers=settings.workers,
        mesh=dict(layout.inner),
        lanes=layout.lanes,
        lane_form=plan.trainer.lane_form,
        batch_size=settings.batch_size,
        steps=settings.steps,
        dispatch_steps=longest_dispatch(settings),
        params=sum(math.prod(x.shape[2:]) for x in params),
        flops=_step_flops(lowered, count_steps(settings) * layout.devices_each),
        state=sends.device_bytes(state),
        largest=_largest_leaves(state),
        delay=delay_of_sends(settings, plan.task, plan.method.algorithm),
        versions={**versions(), **targets.compiler_version(target)},
        ledger=counts.ledger,
        sends=counts.sends,
        uncounted=counts.uncounted,
        compile_seconds=compilation.seconds,
        refused=compilation.refused,
        needed=compilation.needed,
        memory=compilation.memory,
        traffic=compilation.traffic,
    )


def _read_data(plan: RunPlan) -> Data:
    """Returns the task's data, which is read only if its shapes are not declared."""
    c = plan.config
    blank = plan.task.blank
    if blank is not None and c.validation is None:
        return blank()
    return feeding.load_data(plan.task.load, c.task, c.validation)


def longest_dispatch(config: Settings) -> int:
    """Returns the local steps of a run's longest dispatch."""
    ends = {*config.evaluations, *config.checkpoints}
    return max(steps for _, steps in dispatches(ends, config.dispatch_steps))


def count_steps(config: Settings) -> int:
    """Returns the local steps that are compiled, at least two.

    With a single step the compiler removes the loop, by which local steps are found.
    """
    return max(2, longest_dispatch(config))


def _lower(plan: RunPlan, data: Data) -> Lowered:
    """Lowers the run program from shapes only.

    Raises:
        BadRequest: the task or the algorithm does not fit the machine.
    """
    c = plan.config
    with convert_errors("task", c.task):
        params, buffers = jax.eval_shape(plan.task.init, jax.random.key(c.seed))
        if c.mesh is not None:
            plan.trainer.shardings(params)  # refuses params that do not divide
    batches, resident_data = _batch_shapes(c, data)
    with convert_errors("algo", c.algo):
        return plan.trainer.lower(params, batches, buffers, resident_data)


def _batch_shapes(config: Settings, data: Data) -> tuple[Any, Any]:
    """Returns the shapes of batches, and of resident data on the devices or None."""
    train = data.train
    # An entry of a one-dimensional array is a NumPy scalar, which has both, too.
    if isinstance(train, dict):
        example = {name: x[0] for name, x in train.items()}
    else:
        example = train[0]

    def stack_shapes(*axes: int) -> dict[str, jax.ShapeDtypeStruct]:
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype), example
        )

    step_axes = (count_steps(config), config.batch_size)
    if feeding.is_read_on_host(data):
        return stack_shapes(*step_axes), None
    indices = jax.ShapeDtypeStruct(step_axes, np.int32)
    return indices, stack_shapes(data.examples)


def _step_flops(lowered: Lowered, device_steps: int) -> StepFlops:
    """Returns the operations of a local step on one device.

    Args:
        lowered: the run program.
        device_steps: local steps of the program, times the devices of a worker.
    """
    run_flops = count_flops(lowered.jaxpr)
    # Only syncs have branches: the larger branches add the operations of syncs.
    sync_flops = run_flops.most_count - run_flops.least_count
    return StepFlops(
        step=run_flops.least_count / device_steps, sync=sync_flops / device_steps
    )


def _largest_leaves(state: TrainState) -> list[StateArray]:
    """Returns the leaves that take the most memory of a chip, the largest first."""
    leaves = []
    for part, tree in {**state.replica._asdict(), "sync": state.sync}.items():
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            name = checks.leaf_name(path)
            shape = x.sharding.shard_shape(x.shape)
            num_bytes = math.prod(shape) * x.dtype.itemsize
            leaves.append(StateArray(f"{part}/{name}", [*shape], num_bytes))
    return sorted(leaves, key=lambda leaf: -leaf.bytes)[:LEAVES]


class SendCounts(NamedTuple):
    """What a run sends, as the ledger counts it; the fields are those of `Findings`."""

    ledger: Ledger | None = None
    sends: dict[str, Any] | None = None
    uncounted: str | None = None


def _count_sends(plan: RunPlan, state: TrainState) -> SendCounts:
    """Returns the ledger's counts per device; None where only a run can tell them."""
    try:
        program_sends = plan.trainer.program_sends(state)
    except ValueError as error:
        return SendCounts(uncounted=str(error))
    ledger = Ledger(
        always=_as_lists(program_sends.always),
        branched=_as_lists(program_sends.branched),
    )
    try:
        run_sends = plan.trainer.communication(state, plan.config.steps)
    except ValueError:  # the sends depend on the data, but the ledger has each branch
        return SendCounts(ledger)
    kinds, steps = network.sends(run_sends)
    # The counts are per worker; here they are per device, like those of the program.
    device_kinds = []
    for kind in kinds:
        counts = {
            name: (size / run_sends.devices, calls)
            for name, (size, calls) in kind.items()
        }
        device_kinds.append(counts)
    return SendCounts(ledger, sends.to_json(network.Sends(device_kinds, steps)))


def _as_lists(counts: Counts) -> Counts:
    """Returns counts in JSON's types."""
    return {collective: [*pair] for collective, pair in counts.items()}


class Compilation(NamedTuple):
    """What the target's compiler answers; the fields are those of `Findings`."""

    seconds: float
    refused: str | None = None
    needed: int | None = None
    memory: Memory | None = None
    traffic: list[TrafficRow] | None = None


def _compile(plan: RunPlan, lowered: Lowered) -> Compilation:
    """Calls the target's compiler, and returns the findings in its program."""
    start = time.perf_counter()
    layout = plan.trainer.layout
    try:
        program, text = compile_lowered(lowered.program)
    except jax.errors.JaxRuntimeError as error:
        return Compilation(
            time.perf_counter() - start,
            refused=str(error),
            needed=memory_needed(error),
        )
    seconds = time.perf_counter() - start
    analysis = program.memory_analysis()
    memory = None
    if analysis is not None:
        memory = Memory(
            arguments=analysis.argument_size_in_bytes,
            outputs=analysis.output_size_in_bytes,
            aliased=analysis.alias_size_in_bytes,
            temporary=analysis.temp_size_in_bytes,
            code=analysis.generated_code_size_in_bytes,
        )
    collectives = hlo.find_collectives(text)
    traffic = times.traffic(collectives, layout.devices, layout.devices_each)
    return Compilation(seconds, memory=memory, traffic=traffic)


def compile_lowered(lowered: Any) -> tuple[Any, str]:
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
        least_count: number if every condition takes the branch with the fewest.
        most_count: number if every condition takes the branch with the most.
    """

    least_count: float = 0.0
    most_count: float = 0.0


def count_flops(jaxpr: Any) -> Flops:
    """Counts the operations of a jaxpr: 2 for each multiplication and its addition.

    Loops count as often as they run, or once if their length is unknown. Recomputation
    in a gradient counts again. Elementwise operations are left out, because memory
    bounds their speed.

    Args:
        jaxpr: a jaxpr, closed or not.
    """
    equations = getattr(jaxpr, "jaxpr", jaxpr).eqns
    counts = [_count_equation(equation) for equation in equations]
    return Flops(sum(x.least_count for x in counts), sum(x.most_count for x in counts))


def _count_equation(equation: Any) -> Flops:
    """Counts one equation, with what it calls."""
    name = equation.primitive.name
    params = equation.params
    count = _PRODUCTS.get(name)
    if count:
        operations = count(equation)
        return Flops(operations, operations)
    callees = [count_flops(x) for x in core.jaxprs_in_params(params)]
    least_flops = [x.least_count for x in callees]
    most_flops = [x.most_count for x in callees]
    if name == "cond":
        return Flops(min(least_flops), max(most_flops))
    repetitions = params.get("length", 1) if name == "scan" else 1
    return Flops(repetitions * sum(least_flops), repetitions * sum(most_flops))


def _count_dot(equation: Any) -> float:
    """Returns twice the entries of the result times the contracted ones."""
    (contracted, _), _ = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    return 2.0 * equation.outvars[0].aval.size * math.prod(shape[i] for i in contracted)


def _count_convolution(equation: Any) -> float:
    """Returns twice the entries of the result times the kernel's for one feature."""
    kernel = equation.invars[1].aval.shape
    numbers = equation.params
    features = kernel[numbers["dimension_numbers"].rhs_spec[0]]
    # The kernel's inputs are already per group. The strides of a gradient put zeros
    # between the entries, which are not counted.
    entry_products = math.prod(kernel) / features / math.prod(numbers["lhs_dilation"])
    return 2.0 * equation.outvars[0].aval.size * entry_products


_PRODUCTS: dict[str, Callable[[Any], float]] = {
    "dot_general": _count_dot,
    "conv_general_dilated": _count_convolution,
}
