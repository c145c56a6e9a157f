"""Rounds whose length follows a schedule."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

TABLED = 2**16  # local steps whose rounds are looked up; later ones are walked through
LONGEST = 2**30


def scheduled(period: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """step -> whether a round ends with it, when period(s) is the length from s on.

    Where a round starts follows from the lengths of all before it. State could carry
    it, but state is each worker's own, and a branch on it would be no branch under
    vmap: so it is found from the step alone, in a table of the first rounds.
    """

    def length(start):
        steps = jnp.floor(jnp.asarray(period(start), jnp.float32))
        # No number or infinity is a round without an end.
        steps = jnp.nan_to_num(steps, nan=LONGEST, posinf=LONGEST)
        return jnp.clip(steps, 1, LONGEST).astype(jnp.int32)

    @functools.cache
    def first_rounds():
        with jax.ensure_compile_time_eval():
            steps = np.arange(TABLED, dtype=np.int32)
            lengths = np.asarray(jax.jit(jax.vmap(length))(steps))
        starts = [0]
        while (start := starts[-1] + int(lengths[starts[-1]])) < TABLED:
            starts.append(start)
        return np.array(starts, np.int32)

    def ends(step):
        starts = first_rounds()
        at = jnp.searchsorted(jnp.asarray(starts), step, side="right") - 1
        start = lax.while_loop(
            lambda start: step - start >= length(start),
            lambda start: start + length(start),
            jnp.asarray(starts)[at],
        )
        return step - start == length(start) - 1

    return ends
