"""The moments of 1-bit Adam and 0/1 Adam, and a mean that is sent as signs."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from syncalgos import checks
from syncalgos._dtypes import root, zeros
from syncalgos.collectives import Axis, PyTree
from syncalgos.reducers import _hops, _signs, _stacking
from syncalgos.reducers._reducer import over_leaves


class OneBitAdamState(NamedTuple):
    """Adam's m and v, the residual e, and ē of the part that this worker averages."""

    first: PyTree
    second: PyTree
    residual: PyTree
    of_part: PyTree


class Adam(NamedTuple):
    """Adam's checked hyperparams."""

    b1: float
    b2: float
    eps: float

    def step_first_moment(self, m: PyTree, g: PyTree) -> PyTree:
        """m after a gradient g."""
        return jax.tree.map(lambda m, g: self.b1 * m + (1 - self.b1) * g, m, g)

    def step_second_moment(self, v: PyTree, g: PyTree) -> PyTree:
        """v after a gradient g."""
        return jax.tree.map(lambda v, g: self.b2 * v + (1 - self.b2) * g**2, v, g)

    def steps(self, m: PyTree, v: PyTree) -> PyTree:
        """m / (√v + ε), at most as far as Adam can go; 0 where v is 0, or NaN."""
        bound = largest_step(self.b1, self.b2)

        def step_leaf(m: jax.Array, v: jax.Array) -> jax.Array:
            step = jnp.where(v == 0, 0, m / (root(v) + self.eps))
            return jnp.where(jnp.isfinite(step), jnp.clip(step, -bound, bound), jnp.nan)

        return jax.tree.map(step_leaf, m, v)


def largest_step(b1: Any, b2: Any) -> Any:
    """The upper bound of |m| / √v for Adam's moments; infinity if there is none.

    Args:
        b1: the decay of m, at least 0 and below 1.
        b2: the decay of v.
    """
    # By the Cauchy-Schwarz inequality. Without a bound, 1-bit Adam on digits diverged
    # within 13 steps.
    is_bounded = b1**2 < b2
    if not checks.is_traced(is_bounded):
        if not is_bounded:
            return jnp.inf
        return (1 - b1) / ((1 - b2) * (1 - b1**2 / b2)) ** 0.5
    square = (1 - b2) * (1 - b1**2 / jnp.where(is_bounded, b2, 1))
    bound = (1 - b1) / jnp.where(is_bounded, square, 1) ** 0.5
    return jnp.where(is_bounded, bound, jnp.inf)


def check_adam(where: str, b1: float, b2: float, eps: float) -> Adam:
    """Returns Adam's hyperparams, or raises a ValueError for one outside its range."""
    return Adam(
        checks.real(f"{where}: b1", b1, least=0, below=1),
        checks.real(f"{where}: b2", b2, least=0, below=1),
        checks.real(f"{where}: eps", eps, above=0),
    )


def init_state(params: PyTree, axis: Axis) -> OneBitAdamState:
    """The state before the first step."""
    zero = zeros(params)
    return OneBitAdamState(zero, zero, zero, _hops.init_part(zero, axis))


def in_signs(
    x: PyTree, unit: jax.Array | float, b1: float, state: OneBitAdamState, axis: Axis
) -> OneBitAdamState:
    """Averages the workers' momenta as signs, with error feedback of both hops.

    Args:
        x: this worker's momenta, times `unit`.
        unit: the number by which x is divided to give a momentum.
        b1: the decay of the momentum.
        state: the state before. Entries with v = 0 stay 0. If any worker's momentum
            of one is not 0, it waits in the residual, and v becomes the mean of the
            leaf's other v, or if all are 0, the square of the new momenta's size.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The state with the mean as its first moments.
    """
    unit = jnp.where(unit > 0, unit, 1)  # a schedule may end at 0

    def average_leaf(
        x: jax.Array,
        v: jax.Array,
        e: jax.Array,
        part_residual: jax.Array,
        pieces: _stacking.Pieces,
    ) -> tuple[jax.Array, ...]:
        average = pieces.map(partial(_signs.mean_of_signs, axis=axis))
        *results, part_residual = average(
            pieces.split(x + e), pieces.split(v > 0), part_residual
        )
        m, e, waiting = map(pieces.join, results)
        mean_v = jnp.sum(v) / jnp.maximum(jnp.sum(v > 0, dtype=v.dtype), 1)
        first_v = jnp.where(mean_v > 0, mean_v, (waiting / unit / (1 - b1)) ** 2)
        return m / unit, jnp.where(waiting > 0, first_v, v), e, part_residual

    pieces = _stacking.pieces_like(0, x)
    return OneBitAdamState(*over_leaves(average_leaf, 4, x, *state[1:], pieces))
