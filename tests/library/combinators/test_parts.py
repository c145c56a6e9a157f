"""Parts that users give, whose results must have the form of what they were given."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import syncalgos as sa
from syncalgos import collectives, reducers
from syncalgos.writing import leafwise, over_leaves

PARAMS = {"w": np.zeros(3, np.float32)}
ROWS = np.ones((4, 8, 3), np.float32)  # (steps, global batch, numbers)


def train(
    strategy: sa.Strategy, optimizer: optax.GradientTransformation | None = None
) -> tuple[Any, Any]:
    trainer = sa.DataParallel(
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        optimizer or optax.sgd(0.1),
        strategy,
        workers=4,
        backend="vmap",
    )
    return trainer.run(trainer.init(PARAMS), ROWS)


def sum_leaves(tree: Any) -> Any:
    return jax.tree.map(jnp.sum, tree)


def cast_to_half(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float16), tree)


def change_mean(change: Callable[[Any], Any]) -> optax.GradientTransformation:
    """A transformation that changes the form of the mean."""
    return optax.stateless(lambda updates, _: change(collectives.mean(updates)))


def make_scalar_steps(learning_rate: float) -> optax.GradientTransformation:
    """An optimizer whose updates are single numbers."""
    return optax.chain(optax.sgd(learning_rate), optax.stateless(sum_updates))


def sum_updates(updates: Any, params: Any) -> Any:
    return sum_leaves(updates)


def return_one_array() -> Any:
    return leafwise(collectives.mean)


def return_one_number() -> Any:
    return leafwise(lambda x: (collectives.mean(x).sum(), x))


def make_reducer(change: Callable[[Any, Any, Any], Any]) -> reducers.Reducer:
    """A Reducer by hand, of which `change` makes the result of combine."""
    return reducers.Reducer(
        lambda updates, state, step: change(collectives.mean(updates), updates, state)
    )


def return_two_values() -> reducers.Reducer:
    return make_reducer(lambda mean, updates, state: (mean, state))


def return_list() -> reducers.Reducer:
    return make_reducer(lambda mean, updates, state: [mean, updates, state])


def return_scalar_mean() -> reducers.Reducer:
    return make_reducer(lambda mean, updates, state: (sum_leaves(mean), updates, state))


def return_scalar_sent() -> reducers.Reducer:
    return make_reducer(lambda mean, updates, state: (mean, sum_leaves(updates), state))


def return_half_mean() -> reducers.Reducer:
    return make_reducer(
        lambda mean, updates, state: (cast_to_half(mean), updates, state)
    )


def return_bare_mean() -> reducers.Reducer:
    return make_reducer(lambda mean, updates, state: (mean["w"], updates, state))


def return_rows() -> reducers.Reducer:
    def combine(updates: Any, state: Any, step: jax.Array) -> tuple[Any, Any, Any]:
        combined, sent_updates = over_leaves(collectives.mean, 2, updates)
        return combined, sent_updates, state

    return reducers.Reducer(combine)


class Part(NamedTuple):
    """A reducer of a user's own.

    Attributes:
        make: makes the reducer.
        message: what the refusal says.
    """

    make: Callable[[], Any]
    message: str


SHAPE = r"changes {}\['w'\] from float32\[3\] to {}: shape and dtype must stay"
REDUCERS = {
    "one array for two": Part(
        return_one_array, "combine must return 2 values for a leaf, got JitTracer"
    ),
    "one number for a leaf": Part(
        return_one_number, SHAPE.format("combined", r"float32\[\]")
    ),
    "two values": Part(
        return_two_values,
        r"combine of a Reducer must return \(combined, sent, state\), got \(dict, ",
    ),
    "a list": Part(
        return_list, r"must return \(combined, sent, state\), got \(dict, dict"
    ),
    "scalars": Part(return_scalar_mean, SHAPE.format("combined", r"float32\[\]")),
    "scalars that were sent": Part(
        return_scalar_sent, SHAPE.format("sent", r"float32\[\]")
    ),
    "half": Part(return_half_mean, SHAPE.format("combined", r"float16\[3\]")),
    "a bare leaf": Part(
        return_bare_mean, "changes the structure of combined: combined is"
    ),
    "rows for values": Part(
        return_rows, "over_leaves: function must return 2 values for a leaf"
    ),
    "scalars by optax": Part(
        lambda: change_mean(sum_leaves), SHAPE.format("updates", r"float32\[\]")
    ),
    "half by optax": Part(
        lambda: change_mean(cast_to_half), SHAPE.format("updates", r"float16\[3\]")
    ),
}
PLACES = {
    "gradients": sa.reduce_with,
    "params": lambda reducer: sa.average(reduce=reducer),
    "outer step": lambda reducer: sa.outer_step(optax.sgd(1.0), reducer),
    "diloco": lambda reducer: sa.diloco(2, reduce=reducer),
    "feedback": lambda reducer: sa.outer_step(
        optax.sgd(1.0), reducers.error_feedback(reducer)
    ),
    "late": lambda reducer: sa.outer_step(optax.sgd(1.0), reducers.late(reducer)),
}


@pytest.mark.parametrize("name", REDUCERS)
@pytest.mark.parametrize("place", PLACES)
def test_a_reducer_keeps_the_form_of_what_it_combines(place, name):
    part = REDUCERS[name]
    message = part.message
    if "by optax" in name and place in ("feedback", "late"):
        message = r"changes (updates|combined)\['w'\]"
    with pytest.raises(ValueError, match=message.replace("JitTracer", ".*")):
        train(PLACES[place](part.make()))


def make_private_optimizer() -> Any:
    return optax.contrib.differentially_private_aggregate(1.0, 0.1, jax.random.key(0))


OPTIMIZERS = {
    "private gradients": make_private_optimizer,
    "scalars": lambda: make_scalar_steps(0.1),
    "an array of rates": lambda: optax.sgd(lambda step: jnp.full((2, 3), 0.1)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_gives_each_leaf_steps_of_its_shape(name):
    message = r"changes updates\['w'\] from float32\[3\] to float32\[(2,3)?\]"
    optimizer = OPTIMIZERS[name]()
    with pytest.raises(ValueError, match=f"the optimizer {message}"):
        train(sa.sync_sgd(), optimizer)
    with pytest.raises(ValueError, match=f"outer_step: outer {message}"):
        train(sa.outer_step(optimizer))
    wrapped_optimizer = sa.as_optimizer(sa.lookahead(2), optimizer)
    with pytest.raises(ValueError, match=f"as_optimizer: inner {message}"):
        wrapped_optimizer.update(PARAMS, wrapped_optimizer.init(PARAMS), PARAMS)


def test_an_optimizer_may_step_in_other_floats():
    def to_float16(updates: Any, params: Any) -> Any:
        return cast_to_half(updates)

    optimizer = optax.chain(optax.sgd(0.5), optax.stateless(to_float16))
    state, _ = train(sa.sync_sgd(), optimizer)
    expected = 1 - (1 - 0.5 * 2 / 3) ** 4  # the loss is a mean over three numbers
    np.testing.assert_allclose(state.replica.params["w"], expected, rtol=2e-3)


def test_a_schedule_of_learning_rates_returns_numbers():
    with pytest.raises(ValueError, match="must return a number for each step, got"):
        train(sa.qsr(4, learning_rate=lambda step: jnp.full(3, 0.1)))
