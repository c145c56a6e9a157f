"""Each combinator, alone and crossed with others, against one oracle in NumPy."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.problems.quadratics import (
    LR,
    SIZE,
    TrainedQuadratics,
    assert_same,
    make_worker_inputs,
    train,
    train_all,
)
from support.problems.sync_oracles import (
    ALL,
    BODY,
    Filtered,
    Mean,
    NesterovOracle,
    SyncedWorkers,
    average_momenta,
    ends_every,
    reduced,
    reset_momenta,
)

import syncalgos as sa
from syncalgos import chain, delayed, every, masked, paced, participating

pytestmark = pytest.mark.usefixtures("float64")

SGD = optax.sgd(LR)
HEAVY_BALL = optax.sgd(LR, momentum=0.9)
BMUF = {"block_momentum": 0.8, "block_lr": 0.7}
OUTER = {"outer_lr": 0.7, "outer_momentum": 0.8}
AVERAGED = sa.model_averaging(4)
RESET = sa.reset(HEAVY_BALL)
OF_STATE = sa.average("opt_state")

NONE = ~ALL
PART = {"body": True, "head": False}
ROWS = {"body": {"bias": slice(1, 3), "kernel": slice(0, None, 2)}, "head": False}
ROW_ENTRIES = np.zeros(SIZE, bool)
ROW_ENTRIES[[1, 2, *range(4, 8), *range(12, 16)]] = True  # the kernel's rows have 4

# Weights of the four workers in rounds of 4 steps, by round.
WEIGHTS = np.array([[1, 2, 0, 1], [0, 0, 0, 3], [0.5, 0, 1, 0.25]])


def weigh_by_round(step: jax.Array, workers: int) -> jax.Array:
    return jnp.asarray(WEIGHTS)[step // 4 % 3]


def find_round_weights(step: int) -> np.ndarray:
    return WEIGHTS[step // 4 % 3]


def without_second_round(strategy: sa.Strategy, **stale: bool) -> sa.Strategy:
    """Nobody takes part in the second round."""

    def weights(step: jax.Array, workers: int) -> jax.Array:
        return jnp.where(step // 4 == 1, 0.0, jnp.ones(workers))

    return participating(strategy, weights, **stale)


def nobody_in_the_second_round(step: int) -> np.ndarray:
    return np.ones(4) * (step // 4 != 1)


def draw_weights(fraction: float, **settings: Any) -> Callable[[int], np.ndarray]:
    """Weights of the workers: 1 for those who are drawn at a step."""
    return lambda step: np.array(sa.sampled(fraction, **settings)(step, 4), float)


def never_ends(step: int) -> bool:
    return False


def is_in_last_two_of_five(step: Any) -> Any:
    return step % 5 > 2


def ends_behind_first_round(step: int) -> bool:
    """The ends of the rounds of 4 steps behind the first."""
    return step >= 4 and ends_every(4)(step)


def combine_at_first(combine: Callable, steps: int = 4) -> Callable:
    """Gradients as `combine` makes them for so many steps, then each worker's own."""
    return lambda grads, step: combine(grads, step) if step < steps else grads


def behind_six(block: type) -> dict[str, Any]:
    """The hooks of a phase behind six synchronous steps; its first block has two."""
    combine = combine_at_first(reduced(), 6)
    return {
        "ends": ends_behind_first_round,
        "block": block,
        "begins": 6,
        "combine": combine,
    }


# A combination, and its hooks in the oracle.
ALONE = {
    # The period says when it sends, not when it receives.
    "delayed in a period, mixed": (
        every(delayed(sa.average(), 1, alpha=0.5), 4),
        {"delay": 1, "alpha": 0.5},
    ),
    # As in torchft, which mixes on arrival whatever the delay is.
    "mixed at once": (
        delayed(chain(AVERAGED, sa.reset(SGD)), 0, alpha=0.25),
        {"alpha": 0.25},
    ),
    "added, three on the way": (
        delayed(sa.model_averaging(2), 5, alpha=0.5, arrival="add"),
        {"ends": ends_every(2), "delay": 5, "alpha": 0.5, "add": True},
    ),
    "added later than a period and an offset": (
        delayed(every(sa.average(), 8, offset=1), 12, arrival="add"),
        {"ends": ends_every(8, 1), "delay": 12, "add": True},
    ),
    "periods in one another, delayed": (
        delayed(every(every(sa.average(), 4), 2), 6, arrival="add"),
        {"delay": 6, "add": True},
    ),
    # No period tells how many of its results can be under way.
    "schedule, delayed": (
        delayed(every(sa.average(), lambda step: 3), 5, arrival="add"),
        {"ends": ends_every(3), "delay": 5, "add": True},
    ),
    # Nothing arrives in it that was sent before.
    "phase with a center, delayed": (
        chain(sa.until(sa.sync_sgd(), 4), delayed(sa.after(sa.bmuf(4, **BMUF), 4), 2)),
        {
            "ends": ends_behind_first_round,
            "block": Filtered,
            "begins": 4,
            "delay": 2,
            "combine": combine_at_first(reduced()),
        },
    ),
    "phase that begins within a period": (
        chain(sa.until(sa.sync_sgd(), 6), sa.after(sa.bmuf(4, **BMUF), 6)),
        {**behind_six(Filtered), "momentum": 0.9},
    ),
    "phase before the one that it follows": (
        chain(sa.after(sa.diloco(4, **OUTER), 6), sa.until(sa.sync_sgd(), 6)),
        {**behind_six(NesterovOracle), "momentum": 0.9},
    ),
    # Averaging behind it moves params once more at step 5: it begins from there.
    "phase before a member that acts at its start": (
        chain(sa.after(sa.bmuf(4, **BMUF), 6), sa.until(sa.model_averaging(1), 6)),
        behind_six(Filtered),
    ),
    "gradients first and models later, delayed": (
        delayed(sa.post_local_sgd(dense_steps=4, period=4), 2),
        {
            "ends": ends_behind_first_round,
            "delay": 2,
            "combine": combine_at_first(reduced(delay=2)),
        },
    ),
    # Sent so many steps before the end of its period, to arrive there.
    "streaming diloco of one fragment": (
        sa.streaming_diloco(4, fragments=1, delay=2, alpha=0.25, **OUTER),
        {"ends": ends_every(4, 2), "block": NesterovOracle, "delay": 2, "alpha": 0.25},
    ),
    # Params are not rewound to when it was sent.
    "reset, delayed": (
        delayed(every(RESET, 4), 2),
        {"mask": NONE, "moments": reset_momenta, "momentum": 0.9},
    ),
    "part in one gate with another, delayed": (
        delayed(every(chain(masked(sa.average(), PART), sa.average("buffers")), 4), 2),
        {"mask": BODY, "delay": 2},
    ),
    "weighted, in gates apart": (
        participating(chain(AVERAGED, every(OF_STATE, 4)), weigh_by_round),
        {"weights": find_round_weights, "moments": average_momenta, "momentum": 0.9},
    ),
    "weighted, stale": (
        participating(AVERAGED, weigh_by_round, stale=True),
        {"weights": find_round_weights, "stale": True},
    ),
    "weighted, stale, with the optimizer's state": (
        participating(chain(AVERAGED, every(OF_STATE, 4)), weigh_by_round, stale=True),
        {
            "weights": find_round_weights,
            "stale": True,
            "moments": average_momenta,
            "momentum": 0.9,
        },
    ),
    "weighted, stale, and what follows its syncs": (
        sa.at_syncs(participating(AVERAGED, weigh_by_round, stale=True), OF_STATE),
        {
            "weights": find_round_weights,
            "stale": True,
            "moments": average_momenta,
            "momentum": 0.9,
        },
    ),
    "weighted, stale, and a reset": (
        sa.at_syncs(participating(AVERAGED, weigh_by_round, stale=True), RESET),
        {
            "weights": find_round_weights,
            "stale": True,
            "moments": reset_momenta,
            "momentum": 0.9,
        },
    ),
    "weighted around mixed at once": (
        participating(delayed(AVERAGED, 0, alpha=0.25), weigh_by_round),
        {"weights": find_round_weights, "alpha": 0.25},
    ),
    "weighted around mixed at once, with momentum": (
        participating(
            every(delayed(sa.bmuf(1, **BMUF), 0, alpha=0.5), 4), weigh_by_round
        ),
        {"weights": find_round_weights, "alpha": 0.5, "block": Filtered},
    ),
    "weighted inside mixed at once": (
        delayed(participating(AVERAGED, weigh_by_round), 0, alpha=0.25),
        {"weights": find_round_weights, "alpha": 0.25},
    ),
    "weighted, stale, with the optimizer's state, delayed": (
        delayed(
            participating(
                every(chain(sa.average(), OF_STATE), 4), weigh_by_round, stale=True
            ),
            2,
        ),
        {
            "weights": find_round_weights,
            "stale": True,
            "delay": 2,
            "moments": average_momenta,
            "momentum": 0.9,
        },
    ),
    "weighted, stale, delayed": (
        sa.at_syncs(
            delayed(participating(AVERAGED, weigh_by_round, stale=True), 2), RESET
        ),
        {
            "weights": find_round_weights,
            "stale": True,
            "delay": 2,
            "moments": reset_momenta,
            "behind": True,
            "momentum": 0.9,
        },
    ),
    "weighted gradients first and models later": (
        participating(sa.post_local_sgd(dense_steps=4, period=4), weigh_by_round),
        {
            "ends": ends_behind_first_round,
            "weights": find_round_weights,
            "combine": combine_at_first(reduced(find_round_weights)),
        },
    ),
    "in vain, stale": (
        without_second_round(AVERAGED, stale=True),
        {"weights": nobody_in_the_second_round, "stale": True},
    ),
    "in vain, gradients": (
        without_second_round(sa.sync_sgd()),
        {"ends": never_ends, "combine": reduced(nobody_in_the_second_round)},
    ),
    "in vain, each worker's own gradients": (
        without_second_round(chain(sa.reduce_with(optax.scale(1.0)), AVERAGED)),
        {"weights": nobody_in_the_second_round},
    ),
    "in vain, in one gate": (
        without_second_round(every(chain(RESET, sa.average()), 4)),
        {
            "weights": nobody_in_the_second_round,
            "moments": reset_momenta,
            "momentum": 0.9,
        },
    ),
    # At the paper's fraction of 0.1, which of 4 workers is 0.
    "fedavg never copies one of several models to all": (
        sa.fedavg(4, fraction=0.1),
        {"weights": draw_weights(0.5)},
    ),
    "paced to where results arrive": (
        paced(delayed(AVERAGED, 2), [4, 2, 1, 0]),
        {"delay": 2, "quotas": [4, 2, 1, 0]},
    ),
    # Rounds of 2, 4, 8 and 16 steps.
    "schedule, paced": (
        paced(every(sa.average(), lambda step: 2 + step), [9, 9, 3, 3]),
        {"ends": lambda step: step in (1, 5, 13, 29), "quotas": [9, 9, 3, 3]},
    ),
    "decided, paced": (
        paced(sa.decided(sa.average(), lambda r, s, step: step % 8 == 7), [9, 9, 3, 3]),
        {"ends": lambda step: step % 8 == 7, "quotas": [9, 9, 3, 3]},
    ),
    "masked rows": (masked(AVERAGED, ROWS), {"mask": ROW_ENTRIES}),
    "masked, the optimizer whole": (
        masked(every(OF_STATE, 4), PART),
        {"mask": NONE, "moments": average_momenta, "momentum": 0.9},
    ),
    "bmuf of one part and gradients of another": (
        chain(
            chain(masked(sa.sync_sgd(), {"body": False, "head": True})),
            sa.average("buffers"),
            chain(chain(masked(sa.bmuf(4, **BMUF), PART))),
        ),
        {"block": Filtered, "mask": BODY, "combine": reduced(mask=~BODY)},
    ),
    "at syncs that arrive later": (
        sa.at_syncs(delayed(AVERAGED, 2), RESET),
        {"delay": 2, "moments": reset_momenta, "behind": True, "momentum": 0.9},
    ),
    # It works at every local step, whatever is around it.
    "moving average inside": (
        participating(every(sa.ema(sa.average(), 0.9), 4), weigh_by_round),
        {"weights": find_round_weights, "decay": 0.9},
    ),
    # Gradients are no worker's share of a mean that nobody makes.
    "nothing, weighted": (
        participating(sa.Strategy(), weigh_by_round),
        {"ends": never_ends},
    ),
}


STEPS = 32


@pytest.fixture(scope="module")
def alone() -> dict[str, TrainedQuadratics]:
    """Trains all of them, in one program."""

    def pair(
        strategy: sa.Strategy, hooks: dict
    ) -> tuple[sa.Strategy, optax.GradientTransformation]:
        return strategy, HEAVY_BALL if "momentum" in hooks else SGD

    with jax.enable_x64(True):
        pairs = {name: pair(*case) for name, case in ALONE.items()}
        return train_all(pairs, make_worker_inputs(steps=STEPS))


@pytest.mark.parametrize("name", ALONE)
def test_combination_is_as_by_hand(name, alone):
    _, hooks = ALONE[name]
    assert_same(alone[name], SyncedWorkers(**hooks, steps=STEPS))


class Gate(NamedTuple):
    """An expression around `{}`, and its hook.

    Attributes:
        text: the expression.
        ends: step -> whether a sync is sent.
        min_steps: the fewest steps between two syncs.
    """

    text: str
    ends: Callable[[int], bool]
    min_steps: int


GATES = [
    Gate("every({}, 4)", ends_every(4), min_steps=4),
    Gate("every({}, 3, offset=1)", ends_every(3, 1), min_steps=3),
    Gate("every({}, lambda step: 2)", ends_every(2), min_steps=2),
    Gate("sa.when({}, is_in_last_two_of_five)", is_in_last_two_of_five, min_steps=1),
]
# Expressions inside the gate or around `{}`, and their hooks.
BLOCKS = [
    ("sa.average()", Mean),
    ("sa.bmuf(1, **BMUF)", Filtered),
    ("sa.diloco(1, **OUTER)", NesterovOracle),
]
INSIDE = [
    ("{}", {}),
    ("chain({}, sa.Strategy())", {}),
    ("chain({}, OF_STATE)", {"moments": average_momenta}),
]
MASKS = [("PART", BODY), ("ROWS", ROW_ENTRIES), ("True", ALL), ("False", NONE)]


@st.composite
def cross_combinators(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Combinators around one another in any order, and their hooks in the oracle."""
    gate = draw(st.sampled_from(GATES))
    block, block_by_hand = draw(st.sampled_from(BLOCKS))
    inside, hooks_inside = draw(st.sampled_from(INSIDE))
    mask, entries = draw(st.sampled_from(MASKS))
    delay = draw(st.integers(1, 9))
    alpha = draw(st.sampled_from([0, 0.5]))
    add = delay >= gate.min_steps or draw(st.booleans())
    stale = draw(st.booleans())
    arrival = "add" if add else "replace"
    quotas = draw(st.permutations(range(4)))
    hooks_by_wrapper = {
        gate.text: {"ends": gate.ends},
        f"masked({{}}, {mask})": {"mask": entries},
        f"delayed({{}}, {delay}, {alpha=}, {arrival=})": {
            "delay": delay,
            "alpha": alpha,
            "add": add,
        },
        f"participating({{}}, weigh_by_round, {stale=})": {
            "weights": find_round_weights,
            "stale": stale,
        },
        f"paced({{}}, {quotas})": {"quotas": quotas},
        "sa.ema({}, 0.9)": {"decay": 0.9},
    }
    chosen = draw(st.sets(st.sampled_from([*hooks_by_wrapper][1:]), min_size=2))
    order = draw(
        st.permutations([x for x in hooks_by_wrapper if x in chosen or x == gate.text])
    )
    if any(x.startswith("masked") for x in order):
        # Around paced or ema it would be for their work at every step, too.
        order.sort(key=lambda x: x.startswith(("paced", "sa.ema")))
    text = inside.format(block)
    hooks = {"block": block_by_hand, **hooks_inside}
    for wrapper in order:
        text = wrapper.format(text)
        hooks = hooks | hooks_by_wrapper[wrapper]
    if not hooks_inside and draw(st.booleans()):
        text = f"sa.at_syncs({text}, RESET)"
        hooks |= {"moments": reset_momenta, "behind": True}
    return text, hooks


@pytest.mark.slow
@settings(max_examples=20, derandomize=True, phases=[Phase.generate])
@given(cross_combinators())
def test_crossed_combinators_are_as_by_hand(composition):
    text, hooks = composition
    expected = SyncedWorkers(momentum=0.9, steps=16, **hooks)
    assert_same(train(eval(text), HEAVY_BALL, steps=16), expected)
