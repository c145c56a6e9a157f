"""Compiles one algorithm for one target, and reads the program."""

import math
import time
from collections import Counter
from typing import Any

import jax
import numpy as np

from experiments.aiming import compiler, hlo, targets, traffic
from experiments.aiming.compiling import compute
from experiments.aiming.targets import Target
from experiments.cli.errors import BadRequest
from experiments.data import feeding
from experiments.tasks.contract import check_shardings
from experiments.tasks.task import Data
from experiments.training.config import RunConfig, Settings
from experiments.training.loop import dispatches
from experiments.training.measurements import memory, sends
from experiments.training.plan import Plan, check_data, make_plan
from experiments.training.recording import delay_of_sends
from experiments.training.run import refused
from experiments.training.versions import versions
from syncalgos import TrainState
from syncalgos.engine import ahead
from syncalgos.engine.ahead import Lowered

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
    found = targets.devices(target)
    # No more than the workers need: a CPU may have any number of virtual devices.
    devices = found[: config.workers * config.worker_devices]
    try:
        is_batch_given = config.batch_size is not None
        machines = len({targets.place_of(device) for device in devices})
        parts = make_plan(config, machines, devices)
        data = _data(parts)
        check_data(parts.config, data, is_batch_given)
    except ValueError as error:
        raise BadRequest(str(error)) from error
    lowered = _lower(parts, data)
    return {
        **_facts(parts, lowered, target),
        **_sent(parts, lowered.state),
        **_compile(parts, lowered),
    }


def _data(parts: Plan) -> Data:
    """Returns the task's data, which is read only if its shapes are not declared."""
    c, blank = parts.config, parts.task.blank
    if blank is not None and c.validation is None:
        return blank()
    return feeding.load(parts.task.load, c.task, c.validation)


def steps_of(config: Settings) -> int:
    """Returns the local steps of a run's longest dispatch, at least two.

    With a single step the compiler removes the loop, by which local steps are found.
    """
    ends = {*config.evaluations, *config.checkpoints}
    return max(2, *(steps for _, steps in dispatches(ends, config.dispatch_steps)))


def _lower(parts: Plan, data: Data) -> Lowered:
    """Lowers the run program from shapes only."""
    c = parts.config
    with refused("task", c.task):
        params, buffers = jax.eval_shape(parts.task.init, jax.random.key(c.seed))
        if c.mesh is not None:
            check_shardings(parts.task, params, parts.trainer.layout)
    batches, placed = _fed(c, data)
    with refused("algo", c.algo):
        return ahead.lower(parts.trainer, params, batches, buffers, placed)


def _fed(config: Settings, data: Data) -> tuple[Any, Any]:
    """Returns the shapes of batches, and of resident data on the devices or None."""
    lead, train = (steps_of(config), config.batch_size), data.train
    # An entry of a one-dimensional array is a NumPy scalar, which has both, too.
    one = {k: x[0] for k, x in train.items()} if isinstance(train, dict) else train[0]

    def led_by(*axes: int) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            name: jax.ShapeDtypeStruct((*axes, *x.shape), x.dtype)
            for name, x in one.items()
        }

    if feeding.is_read_on_host(data):
        return led_by(*lead), None
    return jax.ShapeDtypeStruct(lead, np.int32), led_by(data.examples)


def _facts(parts: Plan, lowered: Lowered, target: Target) -> dict[str, Any]:
    """Returns the facts that are known before the target's compiler runs."""
    c, layout, state = parts.config, parts.trainer.layout, lowered.state
    found, steps = compute.flops(lowered.jaxpr), steps_of(c)
    each = steps * layout.devices_each
    params = jax.tree.leaves(state.replica.params)
    return {
        "slices": target.slices,
        "workers": c.workers,
        "mesh": dict(layout.inner),
        "lanes": layout.lanes,
        "lane_form": parts.trainer.lane_form,
        "batch_size": c.batch_size,
        "steps": c.steps,
        "dispatch_steps": steps,
        "params": sum(math.prod(x.shape[2:]) for x in params),
        # Only syncs have branches: the larger branches add the operations of syncs.
        "flops": {
            "step": found.least / each,
            "sync": (found.most - found.least) / each,
        },
        "state": memory.device_bytes(state),
        "largest": _largest(state),
        "delay": delay_of_sends(c, parts.task, parts.method.algorithm),
        "versions": {**versions(), **targets.compiler_version(target)},
    }


def _largest(state: TrainState) -> list[dict[str, Any]]:
    """Returns the leaves that take the most memory of a chip, the largest first."""
    held = {**state.replica._asdict(), "sync": state.sync}
    leaves = [
        {
            "name": f"{part}/{jax.tree_util.keystr(path, simple=True, separator='/')}",
            "shape": [*x.sharding.shard_shape(x.shape)],
            "bytes": math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize,
        }
        for part, tree in held.items()
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]
    return sorted(leaves, key=lambda x: -x["bytes"])[:LEAVES]


def _sent(parts: Plan, state: TrainState) -> dict[str, Any]:
    """Returns the ledger's counts per device; None where only a run can tell them."""
    try:
        branches = ahead.sends(parts.trainer, state)
        ledger = {name: _plain(getattr(branches, name)) for name in branches._fields}
    except ValueError as error:
        return {"ledger": None, "sends": None, "uncounted": str(error)}
    try:
        of_run = parts.trainer.communication(state, parts.config.steps)
    except ValueError:  # the sends depend on the data, but the ledger has each branch
        return {"ledger": ledger, "sends": None}
    kinds, of_steps = sends.sends(of_run)
    # The counts are per worker; here they are per device, like those of the program.
    each = [
        {name: (size / of_run.devices, calls) for name, (size, calls) in kind.items()}
        for kind in kinds
    ]
    return {"ledger": ledger, "sends": sends.to_json(sends.Sends(each, of_steps))}


def _plain(counts: Counter) -> dict[str, list[float]]:
    """Returns [bytes, calls] by the kind of collective."""
    kinds = sorted({kind for kind, _ in counts})
    return {k: [float(counts[k, "bytes"]), int(counts[k, "calls"])] for k in kinds}


def _compile(parts: Plan, lowered: Lowered) -> dict[str, Any]:
    """Calls the target's compiler, and returns the findings in its program."""
    start, layout = time.perf_counter(), parts.trainer.layout
    try:
        program, text = compiler.compiled(lowered.program)
    except jax.errors.JaxRuntimeError as error:
        return {
            "compile_seconds": time.perf_counter() - start,
            "refused": str(error),
            "needed": compiler.memory_needed(error),
            "traffic": None,
        }
    seconds, found = time.perf_counter() - start, program.memory_analysis()
    read = hlo.read(text)
    return {
        "compile_seconds": seconds,
        "memory": found
        and {k: getattr(found, f"{x}_size_in_bytes") for k, x in MEMORY.items()},
        "traffic": traffic.traffic(read, layout.devices, layout.devices_each),
    }
