"""The laws of compositions hold, as far as a run of the tests can wait.

`make laws` asks them of more compositions. One that fails here is asked again by its
number: `make laws ARGS="--first N --count 1"`.
"""

import jax
import numpy as np
import pytest
from compositions import NEUTRAL
from laws import DISPATCH, Asked, Drawn, Trained, data, draw, judge, neutral, some
from support.tiers import tiers

pytestmark = pytest.mark.usefixtures("float64")

# A strategy of each kind, and the wrappers that must not change it.
KINDS = ["sync_sgd()", "bmuf(period=3)", "fedavg(period=3)", "easgd(period=3)"]
KINDS += ["paced(average(), SLOW)", "participating(diloco(period=4), HEAVY)"]
QUICK = [*KINDS[:2], KINDS[3], KINDS[5]]  # half a second each

# Compositions that take a second or less. Those that are drawn by a number change with
# each new algorithm.
SHORT = [
    Drawn("at_end(average('params', 'clipped'), 24)", 2, "sgd", "plain"),
    Drawn("after(fedprox(period=3), 6)", 4, "sgd", "plain"),
    Drawn("delayed(gpa(), 5, arrival='add')", 4, "clipped", "plain"),
    Drawn("delayed(every(bmuf(period=4), 3), 0, alpha=.5)", 4, "sgd", "plain"),
    Drawn("every(decided(outer_step(optax.sgd(.7)), FAR), 4)", 2, "sgd", "plain"),
    Drawn(
        "every(masked(participating(average(), FIRST_OUT), PART), 3)", 3, "sgd", "plain"
    ),
    Drawn(
        "chain(until(sync_sgd(), 6), after(delayed(bmuf(period=4), 2), 6))",
        3,
        "sgd",
        "plain",
    ),
    Drawn(
        "ema(chain(until(masked(bmuf(period=3), ROWS), 8), after(sync_sgd(), 8)), .5)",
        3,
        "clipped",
        "plain",
    ),
    Drawn(
        "participating(delayed(diloco(period=4), 1, alpha=.5), FIRST_OUT, stale=True)",
        3,
        "momentum",
        "plain",
    ),
    Drawn("paced(average(), REST)", 3, "momentum", "plain"),
    Drawn(
        "chain(every(average('opt_state'), 4), every(every(average(), GROWS), 4))",
        4,
        "sgd",
        "plain",
    ),
]


def assert_lawful(drawn, rng, asked):
    _, found = judge(drawn, rng, asked)
    broken = [f"{law}: {what}" for law, what in found if what]
    assert not broken, drawn


@pytest.mark.parametrize("kind", tiers(KINDS, QUICK))
def test_what_must_change_nothing_changes_nothing(kind):
    _, rng = draw(0, KINDS.index(kind))
    assert_lawful(Drawn(kind, 3, "momentum", "plain"), rng, [neutral])


@pytest.fixture(scope="module")
def bmuf_trained() -> Asked:
    """BMUF of three workers, trained in two dispatches."""
    drawn = Drawn("bmuf(period=3)", 3, "momentum", "plain")
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        made = Trained(drawn)
        batches = data(rng, drawn.workers, 2 * DISPATCH, size=made.size)
        return Asked(drawn, rng, made, batches, made.train(batches), {"bmuf"})


WEIGHED = "participating(X, ALIKE, stale=True)"  # most mutants fail here


@pytest.mark.parametrize("wrapper", tiers(NEUTRAL, [WEIGHED]))
def test_each_wrapper_leaves_bmuf_as_it_is(wrapper: str, bmuf_trained: Asked):
    broken = [what for _, what in neutral(bmuf_trained, wrapper) if what]
    assert not broken


@pytest.mark.parametrize("drawn", SHORT, ids=lambda drawn: drawn.expression)
def test_short_compositions_are_lawful(drawn):
    rng = np.random.default_rng(SHORT.index(drawn))
    assert_lawful(drawn, rng, some(rng))


@pytest.mark.parametrize("number", tiers(range(80), [0], range(1, 29)))
def test_random_compositions_are_lawful_or_refused(number):
    drawn, rng = draw(0, number)
    assert_lawful(drawn, rng, some(rng))
