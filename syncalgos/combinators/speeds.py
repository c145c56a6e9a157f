"""Workers of different speeds, on the clock of the fastest."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

UNIT = 1024  # speeds are whole parts of it: their products with steps are exact


class Clock(NamedTuple):
    """When each worker makes its local steps, and ends its rounds.

    At each step of the clock the fastest worker makes a local step, one of speed s in
    s of them. All follows from the clock's step alone, so that it is the same on all
    workers, after a resume, and for the ledger.

    Attributes:
        speeds: of each worker, in parts of UNIT.
        periods: of each worker, its own local steps in a round.
    """

    speeds: tuple[int, ...]
    periods: tuple[int, ...]

    def done(self, step: jax.Array) -> jax.Array:
        """The local steps that each worker has made before this one of the clock."""
        speeds = jnp.array(self.speeds, jnp.int32)
        return step // UNIT * speeds + step % UNIT * speeds // UNIT

    def moves(self, step: jax.Array) -> jax.Array:
        """Which workers make a local step."""
        return self.done(step + 1) > self.done(step)

    def arrives(self, step: jax.Array) -> jax.Array:
        """Which workers end a round."""
        ends = self.done(step + 1) % jnp.array(self.periods, jnp.int32) == 0
        return self.moves(step) & ends


def evenly(workers: int, slowest: float, period: int, paced: bool) -> Clock:
    """A clock of workers whose speeds fall evenly, from 1 to that of the slowest.

    Args:
        workers: their number.
        slowest: its speed, above 0 and at most 1; of one worker it is 1.
        period: local steps of the fastest in a round.
        paced: whether others take fewer, as they are slower.
    """
    lost = UNIT - max(1, round(slowest * UNIT))
    speeds = [UNIT - lost * i // max(workers - 1, 1) for i in range(workers)]
    periods = [max(1, period * s // UNIT) if paced else period for s in speeds]
    return Clock(tuple(speeds), tuple(periods))
