"""The program of local steps before it is compiled, and what it sends."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax

from syncalgos._engine.state import TrainState


class Lowered(NamedTuple):
    """The program of `DataParallel.run` before it is compiled.

    Attributes:
        state: the first state, shapes with their shardings.
        jaxpr: the traced program, in which a worker's mesh is one device.
        program: the lowered program; `program.compile()` calls the devices' compiler.

    Example:
        >>> import jax
        >>> import optax
        >>> from syncalgos import DataParallel, Placement, bmuf
        >>> loss = lambda params, batch: (params - batch).mean() ** 2
        >>> trainer = DataParallel(
        ...     loss, optax.sgd(0.1), bmuf(4), workers=2, backend="shard_map"
        ... )
        >>> shape = jax.ShapeDtypeStruct
        >>> lowered = trainer.lower(shape((), "float32"), shape((4, 2), "float32"))
        >>> memory = lowered.program.compile().memory_analysis()
        >>> memory.temp_size_in_bytes > 0
        True
    """

    state: TrainState
    jaxpr: Any
    program: jax.stages.Lowered


class ProgramSends(NamedTuple):
    """What a device sends in a step that takes each branch of its program once.

    Attributes:
        always: bytes and calls by collective outside of branches, in every step.
        branched: those in branches, each branch counted once.

    Example:
        >>> import jax.numpy as jnp
        >>> import optax
        >>> from syncalgos import DataParallel, bmuf
        >>> loss = lambda params, batch: (params - batch).mean() ** 2
        >>> trainer = DataParallel(loss, optax.sgd(0.1), bmuf(4), workers=2)
        >>> state = trainer.init(jnp.zeros(10))
        >>> trainer.program_sends(state).always  # bmuf sends in a branch
        {}
    """

    always: Mapping[str, tuple[float, int]]
    branched: Mapping[str, tuple[float, int]]


def by_collective(traffic: Counter) -> dict[str, tuple[float, int]]:
    """Returns bytes and calls by collective, of counts by (collective, quantity)."""
    names = sorted({name for name, _ in traffic})
    return {
        name: (float(traffic[name, "bytes"]), int(traffic[name, "calls"]))
        for name in names
    }
