"""Each combinator, alone and crossed with others, against one oracle in NumPy."""

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
    assert_same,
    of_workers,
    train,
    train_all,
)
from support.problems.sync_oracles import (
    ALL,
    BODY,
    Filtered,
    Mean,
    Nesterov,
    Synced,
    averaged,
    each,
    reduced,
    zeroed,
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
IN_ROWS = np.zeros(SIZE, bool)
IN_ROWS[[1, 2, *range(4, 8), *range(12, 16)]] = True  # the kernel's rows have 4

# Weights of the four workers in rounds of 4 steps, by round.
WEIGHTS = np.array([[1, 2, 0, 1], [0, 0, 0, 3], [0.5, 0, 1, 0.25]])


def by_round(step, workers):
    return jnp.asarray(WEIGHTS)[step // 4 % 3]


def of_round(step):
    return WEIGHTS[step // 4 % 3]


def in_vain(strategy, **stale):
    """Nobody takes part in the second round."""

    def weights(step, workers):
        return jnp.where(step // 4 == 1, 0.0, jnp.ones(workers))

    return participating(strategy, weights, **stale)


def nobody_in_the_second_round(step):
    return np.ones(4) * (step // 4 != 1)


def drawn(fraction, **settings):
    """Weights of the workers: 1 for those who are drawn at a step."""
    return lambda step: np.array(sa.sampled(fraction, **settings)(step, 4), float)


def never(step):
    return False


def two_of_five(step):
    return step % 5 > 2


def late(step):
    """The ends of the rounds of 4 steps behind the first."""
    return step >= 4 and each(4)(step)


def at_first(combine, steps=4):
    """Gradients as `combine` makes them for so many steps, then each worker's own."""
    return lambda grads, step: combine(grads, step) if step < steps else grads


def behind_six(block):
    """The hooks of a phase behind six synchronous steps; its first block has two."""
    combine = at_first(reduced(), 6)
    return {"ends": late, "block": block, "begins": 6, "combine": combine}


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
        {"ends": each(2), "delay": 5, "alpha": 0.5, "add": True},
    ),
    "added later than a period and an offset": (
        delayed(every(sa.average(), 8, offset=1), 12, arrival="add"),
        {"ends": each(8, 1), "delay": 12, "add": True},
    ),
    "periods in one another, delayed": (
        delayed(every(every(sa.average(), 4), 2), 6, arrival="add"),
        {"delay": 6, "add": True},
    ),
    # No period tells how many of its results can be under way.
    "schedule, delayed": (
        delayed(every(sa.average(), lambda step: 3), 5, arrival="add"),
        {"ends": each(3), "delay": 5, "add": True},
    ),
    # Nothing arrives in it that was sent before.
    "phase with a center, delayed": (
        chain(sa.until(sa.sync_sgd(), 4), delayed(sa.after(sa.bmuf(4, **BMUF), 4), 2)),
        {
            "ends": late,
            "block": Filtered,
            "begins": 4,
            "delay": 2,
            "combine": at_first(reduced()),
        },
    ),
    "phase that begins within a period": (
        chain(sa.until(sa.sync_sgd(), 6), sa.after(sa.bmuf(4, **BMUF), 6)),
        {**behind_six(Filtered), "momentum": 0.9},
    ),
    "phase before the one that it follows": (
        chain(sa.after(sa.diloco(4, **OUTER), 6), sa.until(sa.sync_sgd(), 6)),
        {**behind_six(Nesterov), "momentum": 0.9},
    ),
    # Averaging behind it moves params once more at step 5: it begins from there.
    "phase before a member that acts at its start": (
        chain(sa.after(sa.bmuf(4, **BMUF), 6), sa.until(sa.model_averaging(1), 6)),
        behind_six(Filtered),
    ),
    "gradients first and models later, delayed": (
        delayed(sa.post_local_sgd(dense_steps=4, period=4), 2),
        {"ends": late, "delay": 2, "combine": at_first(reduced(delay=2))},
    ),
    # Sent so many steps before the end of its period, to arrive there.
    "streaming diloco of one fragment": (
        sa.streaming_diloco(4, fragments=1, delay=2, alpha=0.25, **OUTER),
        {"ends": each(4, 2), "block": Nesterov, "delay": 2, "alpha": 0.25},
    ),
    # Params are not rewound to when it was sent.
    "reset, delayed": (
        delayed(every(RESET, 4), 2),
        {"mask": NONE, "moments": zeroed, "momentum": 0.9},
    ),
    "part in one gate with another, delayed": (
        delayed(every(chain(masked(sa.average(), PART), sa.average("buffers")), 4), 2),
        {"mask": BODY, "delay": 2},
    ),
    "weighted, in gates apart": (
        participating(chain(AVERAGED, every(OF_STATE, 4)), by_round),
        {"weights": of_round, "moments": averaged, "momentum": 0.9},
    ),
    "weighted, stale": (
        participating(AVERAGED, by_round, stale=True),
        {"weights": of_round, "stale": True},
    ),
    "weighted, stale, with the optimizer's state": (
        participating(chain(AVERAGED, every(OF_STATE, 4)), by_round, stale=True),
        {"weights": of_round, "stale": True, "moments": averaged, "momentum": 0.9},
    ),
    "weighted, stale, and what follows its syncs": (
        sa.at_syncs(participating(AVERAGED, by_round, stale=True), OF_STATE),
        {"weights": of_round, "stale": True, "moments": averaged, "momentum": 0.9},
    ),
    "weighted, stale, and a reset": (
        sa.at_syncs(participating(AVERAGED, by_round, stale=True), RESET),
        {"weights": of_round, "stale": True, "moments": zeroed, "momentum": 0.9},
    ),
    "weighted around mixed at once": (
        participating(delayed(AVERAGED, 0, alpha=0.25), by_round),
        {"weights": of_round, "alpha": 0.25},
    ),
    "weighted around mixed at once, with momentum": (
        participating(every(delayed(sa.bmuf(1, **BMUF), 0, alpha=0.5), 4), by_round),
        {"weights": of_round, "alpha": 0.5, "block": Filtered},
    ),
    "weighted inside mixed at once": (
        delayed(participating(AVERAGED, by_round), 0, alpha=0.25),
        {"weights": of_round, "alpha": 0.25},
    ),
    "weighted, stale, delayed": (
        sa.at_syncs(delayed(participating(AVERAGED, by_round, stale=True), 2), RESET),
        {
            "weights": of_round,
            "stale": True,
            "delay": 2,
            "moments": zeroed,
            "behind": True,
            "momentum": 0.9,
        },
    ),
    "weighted gradients first and models later": (
        participating(sa.post_local_sgd(dense_steps=4, period=4), by_round),
        {"ends": late, "weights": of_round, "combine": at_first(reduced(of_round))},
    ),
    "in vain, stale": (
        in_vain(AVERAGED, stale=True),
        {"weights": nobody_in_the_second_round, "stale": True},
    ),
    "in vain, gradients": (
        in_vain(sa.sync_sgd()),
        {"ends": never, "combine": reduced(nobody_in_the_second_round)},
    ),
    "in vain, each worker's own gradients": (
        in_vain(chain(sa.reduce_with(optax.scale(1.0)), AVERAGED)),
        {"weights": nobody_in_the_second_round},
    ),
    "in vain, in one gate": (
        in_vain(every(chain(RESET, sa.average()), 4)),
        {"weights": nobody_in_the_second_round, "moments": zeroed, "momentum": 0.9},
    ),
    # At the paper's fraction of 0.1, which of 4 workers is 0.
    "fedavg never copies one of several models to all": (
        sa.fedavg(4, fraction=0.1),
        {"weights": drawn(0.5)},
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
    "masked rows": (masked(AVERAGED, ROWS), {"mask": IN_ROWS}),
    "masked, the optimizer whole": (
        masked(every(OF_STATE, 4), PART),
        {"mask": NONE, "moments": averaged, "momentum": 0.9},
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
        {"delay": 2, "moments": zeroed, "behind": True, "momentum": 0.9},
    ),
    # It works at every local step, whatever is around it.
    "moving average inside": (
        participating(every(sa.ema(sa.average(), 0.9), 4), by_round),
        {"weights": of_round, "decay": 0.9},
    ),
    # Gradients are no worker's share of a mean that nobody makes.
    "nothing, weighted": (participating(sa.Strategy(), by_round), {"ends": never}),
}


STEPS = 32


@pytest.fixture(scope="module")
def alone():
    """Trains all of them, in one program."""

    def pair(strategy, hooks):
        return strategy, HEAVY_BALL if "momentum" in hooks else SGD

    with jax.enable_x64(True):
        made = {name: pair(*case) for name, case in ALONE.items()}
        return train_all(made, of_workers(steps=STEPS))


@pytest.mark.parametrize("name", ALONE)
def test_combination_is_as_by_hand(name, alone):
    _, hooks = ALONE[name]
    assert_same(alone[name], Synced(**hooks, steps=STEPS))


# Expressions for what is around `{}`, and their hooks. A gate comes with the fewest
# steps between two syncs.
GATES = [
    ("every({}, 4)", each(4), 4),
    ("every({}, 3, offset=1)", each(3, 1), 3),
    ("every({}, lambda step: 2)", each(2), 2),
    ("sa.when({}, two_of_five)", two_of_five, 1),
]
BLOCKS = [
    ("sa.average()", Mean),
    ("sa.bmuf(1, **BMUF)", Filtered),
    ("sa.diloco(1, **OUTER)", Nesterov),
]
INSIDE = [
    ("{}", {}),
    ("chain({}, sa.Strategy())", {}),
    ("chain({}, OF_STATE)", {"moments": averaged}),
]
MASKS = [("PART", BODY), ("ROWS", IN_ROWS), ("True", ALL), ("False", NONE)]


@st.composite
def crossed(draw):
    """Combinators around one another in any order, and their hooks in the oracle."""
    (gate, ends, apart), (block, by_hand), (inside, own), (mask, entries) = (
        draw(st.sampled_from(values)) for values in (GATES, BLOCKS, INSIDE, MASKS)
    )
    delay = draw(st.integers(1, 9))
    alpha = draw(st.sampled_from([0, 0.5]))
    add = delay >= apart or draw(st.booleans())
    stale = draw(st.booleans())
    arrival = "add" if add else "replace"
    quotas = draw(st.permutations(range(4)))
    around = {
        gate: {"ends": ends},
        f"masked({{}}, {mask})": {"mask": entries},
        f"delayed({{}}, {delay}, {alpha=}, {arrival=})": {
            "delay": delay,
            "alpha": alpha,
            "add": add,
        },
        f"participating({{}}, by_round, {stale=})": {
            "weights": of_round,
            "stale": stale,
        },
        f"paced({{}}, {quotas})": {"quotas": quotas},
        "sa.ema({}, 0.9)": {"decay": 0.9},
    }
    chosen = draw(st.sets(st.sampled_from([*around][1:]), min_size=2))
    order = draw(st.permutations([x for x in around if x in chosen or x == gate]))
    if any(x.startswith("masked") for x in order):
        # Around paced or ema it would be for their work at every step, too.
        order.sort(key=lambda x: x.startswith(("paced", "sa.ema")))
    text = inside.format(block)
    hooks = {"block": by_hand, **own}
    for each_around in order:
        text = each_around.format(text)
        hooks = hooks | around[each_around]
    if not own and draw(st.booleans()):
        text = f"sa.at_syncs({text}, RESET)"
        hooks |= {"moments": zeroed, "behind": True}
    return text, hooks


@pytest.mark.slow
@settings(max_examples=20, derandomize=True, phases=[Phase.generate])
@given(crossed())
def test_crossed_combinators_are_as_by_hand(composition):
    text, hooks = composition
    expected = Synced(momentum=0.9, steps=16, **hooks)
    assert_same(train(eval(text), HEAVY_BALL, steps=16), expected)
