"""From which local step on a center depends on the examples of which step.

The center after n local steps includes step s if other examples at step s change it.
Whether they do is tried by training: no declaration of a strategy is asked.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.requirements import SHAPES, make, owed

import syncalgos as sa

STEPS = 23
FIRST_STEPS = 9  # a round of four, two on the way, and the next round
WORKERS = 4
PARAMS = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()}
SGD = optax.sgd(0.1)


def loss(params: Any, batch: Any) -> Any:
    """A linear loss: the gradient of a step is the mean of its examples."""
    products = jax.tree.map(lambda p, x: jnp.sum(p * jnp.mean(x, 0)), params, batch)
    return sum(jax.tree.leaves(products))


def in_turn(step: jax.Array, workers: int) -> jax.Array:
    """Of every two rounds of four steps, nobody takes part in the second."""
    return jnp.where(step % 8 < 4, jnp.ones(workers), jnp.zeros(workers))


def longer_rounds(step: Any) -> Any:
    return 2 + step // 4


def is_matrix(path: str, shape: tuple[int, ...]) -> bool:
    return len(shape) == 2


COMPOSITIONS = {
    "delayed gradients": lambda: sa.delayed(sa.sync_sgd(), 2),
    "late gradients": lambda: sa.sync_sgd(reduce=sa.reducers.late()),
    "delayed late gradients": lambda: sa.delayed(
        sa.sync_sgd(reduce=sa.reducers.late()), 2
    ),
    "late gradients with feedback": lambda: sa.sync_sgd(
        reduce=sa.reducers.error_feedback(sa.reducers.late())
    ),
    "late clipped gradients": lambda: sa.sync_sgd(
        reduce=sa.reducers.late(optax.chain(optax.clip(1e6), sa.reducers.mean()))
    ),
    "delayed bmuf": lambda: sa.delayed(sa.bmuf(4), 2),
    "delayed bmuf, added": lambda: sa.delayed(sa.bmuf(4), 2, arrival="add"),
    "delayed averages": lambda: sa.delayed(sa.model_averaging(4), 2),
    "delayed averages, mixed": lambda: sa.delayed(sa.model_averaging(4), 2, alpha=0.5),
    "delayed easgd": lambda: sa.delayed(sa.easgd(4), 2),
    "late diloco": lambda: sa.diloco(4, reduce=sa.reducers.late()),
    "late outer step": lambda: sa.every(
        sa.outer_step(optax.sgd(0.7), sa.reducers.late()), 5
    ),
    "fragments with a delay": lambda: sa.streaming_diloco(6, fragments=2, delay=2),
    "fragments of one": lambda: sa.streaming_diloco(8, fragments=1, delay=5),
    "paced bmuf": lambda: sa.paced(sa.bmuf(4), [2, 2, 2, 2]),
    "paced bmuf, one slower": lambda: sa.paced(sa.bmuf(4), [1, 2, 3, 2]),
    "paced averages": lambda: sa.paced(sa.model_averaging(4), [2, 2, 2, 2]),
    "paced bmuf without steps": lambda: sa.paced(sa.bmuf(4), [0, 0, 0, 0]),
    "moving average of paced bmuf": lambda: sa.ema(
        sa.paced(sa.bmuf(4), [1, 3, 2, 0]), 0.5
    ),
    "moving average": lambda: sa.ema(sa.bmuf(4), 0.5),
    "moving average of averages": lambda: sa.ema(sa.model_averaging(4), 0.5),
    "a schedule": lambda: sa.every(
        sa.outer_step(optax.sgd(0.7), sa.reducers.mean()), longer_rounds
    ),
    "two periods": lambda: sa.chain(sa.bmuf(5), sa.every(sa.average("opt_state"), 3)),
    "a condition": lambda: sa.when(sa.bmuf(2), lambda step: step % 3 == 2),
    "until": lambda: sa.until(sa.bmuf(4), 10),
    "after": lambda: sa.after(sa.bmuf(4), 6),
    "after, delayed": lambda: sa.after(sa.delayed(sa.bmuf(4), 2), 6),
    "first synchronous": lambda: sa.chain(
        sa.until(sa.sync_sgd(), 6), sa.after(sa.diloco(4), 6)
    ),
    "at the end": lambda: sa.at_end(sa.bmuf(4), 23),
    "at the end, late": lambda: sa.at_end(sa.diloco(4, reduce=sa.reducers.late()), 22),
    "participation": lambda: sa.participating(sa.bmuf(4), in_turn),
    "participation, late": lambda: sa.participating(sa.co2(4), in_turn),
    "at syncs": lambda: sa.at_syncs(sa.bmuf(4), sa.average("opt_state")),
    "masks": lambda: sa.chain(
        sa.masked(sa.bmuf(4), is_matrix),
        sa.masked(sa.diloco(6), lambda path, shape: not is_matrix(path, shape)),
    ),
    "measured": lambda: sa.measured(sa.bmuf(4)),
    "unlike speeds": lambda: sa.async_diloco(4, slowest=0.5),
    "unlike speeds of fragments": lambda: sa.decoupled_diloco(
        4, fragments=2, slowest=0.5
    ),
    "unlike speeds of regions": lambda: sa.halos(4, slowest=0.5, updates=2),
    "three levels": lambda: sa.hierarchical(8, inner_period=2),
    "fewer steps in the first": lambda: sa.qsr(3, learning_rate=0.1, growth=0.3),
}
ALGORITHMS = {name: functools.partial(make, name) for name in sa.ALGORITHMS}
DEFAULT_NAMES = (
    "streaming_diloco",
    "easgd",
    "halos",
    "delayed gradients",
    "delayed bmuf",
    "fragments with a delay",
    "late diloco",
    "paced bmuf",
    "moving average",
    "participation, late",
)


def try_last_steps(
    strategy: sa.Strategy, optimizer: optax.GradientTransformation, steps: int
) -> np.ndarray:
    """The last local step whose examples changed the center, after 0, 1, … steps.

    Returns:
        (steps + 1,) whole numbers; 0 where no step's did.
    """
    draws = np.random.default_rng(0)
    batches = {
        name: draws.normal(size=(steps, WORKERS, *shape))
        for name, shape in SHAPES.items()
    }
    batches = jax.tree.map(np.float32, batches)
    # So far away that they change signs of sums, too, as of signum's momentum.
    altered_batches = jax.tree.map(lambda x: -1000 * x + 1, batches)
    trainer = sa.DataParallel(
        loss, optimizer, strategy, workers=WORKERS, backend="vmap"
    )

    def step(state: Any, number: int, examples: Any) -> Any:
        copied = jax.tree.map(lambda x: jnp.array(x, copy=True), state)
        batch = jax.tree.map(lambda x: x[number : number + 1], examples)
        return trainer.run(copied, batch)[0]

    def center(state: Any) -> np.ndarray:
        leaves = jax.tree.leaves(trainer.center(state).params)
        return np.concatenate([np.ravel(x) for x in leaves])

    states = [trainer.init(PARAMS)]
    for number in range(steps):
        states.append(step(states[-1], number, batches))
    centers = [center(state) for state in states]
    changing_steps = np.zeros(steps + 1, int)
    for altered in range(steps):
        state = step(states[altered], altered, altered_batches)
        for seen_step in range(altered + 1, steps + 1):
            if seen_step > altered + 1:
                state = step(state, seen_step - 1, batches)
            if not np.array_equal(center(state), centers[seen_step]):
                changing_steps[seen_step] = altered + 1
    return changing_steps


def compare_declared_steps(name: str, steps: int) -> None:
    """Requires that a strategy declares what its training shows."""
    strategy = (ALGORITHMS | COMPOSITIONS)[name]()
    optimizer = owed(name).optimizer if name in ALGORITHMS else SGD
    declared_steps = sa.describe(strategy, workers=WORKERS).included_steps(steps)
    measured_steps = try_last_steps(strategy, optimizer, steps)
    assert declared_steps.tolist() == measured_steps.tolist()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DEFAULT_NAMES)
def test_the_center_includes_the_first_steps_that_change_it(name):
    compare_declared_steps(name, FIRST_STEPS)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [*ALGORITHMS, *COMPOSITIONS])
def test_the_center_includes_the_steps_that_change_it(name):
    compare_declared_steps(name, STEPS)
