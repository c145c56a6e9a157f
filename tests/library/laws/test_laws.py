"""The laws of compositions hold, as far as a run of the tests can wait.

`make laws` asks them of more compositions. One that fails here is asked again by its
number: `make laws ARGS="--first N --count 1"`.
"""

import jax
import numpy as np
import pytest
from compositions import NEUTRAL
from laws import (
    DISPATCH,
    Composition,
    CompositionTrainer,
    LawCase,
    choose_laws,
    draw_composition,
    judge,
    make_batches,
    neutrality_law,
)
from support.tiers import tiers

pytestmark = pytest.mark.usefixtures("float64")

# A strategy of each kind, and the wrappers that must not change it.
KINDS = ["sync_sgd()", "bmuf(period=3)", "fedavg(period=3)", "easgd(period=3)"]
KINDS += ["paced(average(), SLOW)", "participating(diloco(period=4), HEAVY)"]
QUICK = [*KINDS[:2], KINDS[3], KINDS[5]]  # half a second each

# Compositions that take a second or less. Those that are drawn by a number change with
# each new algorithm.
SHORT = [
    Composition("at_end(average('params', 'clipped'), 24)", workers=2),
    Composition("after(fedprox(period=3), 6)", workers=4),
    Composition("delayed(gpa(), 5, arrival='add')", workers=4, optimizer="clipped"),
    Composition("delayed(every(bmuf(period=4), 3), 0, alpha=.5)", workers=4),
    Composition("every(decided(outer_step(optax.sgd(.7)), FAR), 4)", workers=2),
    Composition(
        "every(masked(participating(average(), FIRST_OUT), PART), 3)", workers=3
    ),
    Composition(
        "chain(until(sync_sgd(), 6), after(delayed(bmuf(period=4), 2), 6))", workers=3
    ),
    Composition(
        "ema(chain(until(masked(bmuf(period=3), ROWS), 8), after(sync_sgd(), 8)), .5)",
        workers=3,
        optimizer="clipped",
    ),
    Composition(
        "participating(delayed(diloco(period=4), 1, alpha=.5), FIRST_OUT, stale=True)",
        workers=3,
        optimizer="momentum",
    ),
    Composition("paced(average(), REST)", workers=3, optimizer="momentum"),
    Composition(
        "chain(every(average('opt_state'), 4), every(every(average(), GROWS), 4))",
        workers=4,
    ),
]


def assert_lawful(
    composition: Composition, rng: np.random.Generator, laws: list
) -> None:
    findings = judge(composition, rng, laws).findings
    faults = [finding for finding in findings if finding.fault]
    assert not faults, composition


@pytest.mark.parametrize("kind", tiers(KINDS, QUICK))
def test_neutral_wrappers_leave_each_kind_as_it_is(kind):
    _, rng = draw_composition(0, KINDS.index(kind))
    assert_lawful(
        Composition(kind, workers=3, optimizer="momentum"), rng, [neutrality_law]
    )


@pytest.fixture(scope="module")
def trained_bmuf() -> LawCase:
    """BMUF of three workers, trained in two dispatches."""
    composition = Composition("bmuf(period=3)", workers=3, optimizer="momentum")
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        trainer = CompositionTrainer(composition)
        batches = make_batches(
            rng, composition.workers, 2 * DISPATCH, size=trainer.size
        )
        return LawCase(
            composition=composition,
            rng=rng,
            trainer=trainer,
            batches=batches,
            outcome=trainer.train(batches),
            names={"bmuf"},
        )


WEIGHED = "participating(X, ALIKE, stale=True)"  # most mutants fail here


@pytest.mark.parametrize("wrapper", tiers(NEUTRAL, [WEIGHED]))
def test_each_wrapper_leaves_bmuf_as_it_is(wrapper: str, trained_bmuf: LawCase):
    findings = neutrality_law(trained_bmuf, wrapper)
    assert not [finding.fault for finding in findings if finding.fault]


@pytest.mark.parametrize(
    "composition", SHORT, ids=lambda composition: composition.expression
)
def test_short_compositions_are_lawful(composition):
    rng = np.random.default_rng(SHORT.index(composition))
    assert_lawful(composition, rng, choose_laws(rng))


@pytest.mark.parametrize("number", tiers(range(80), [0], range(1, 29)))
def test_random_compositions_are_lawful_or_refused(number):
    composition, rng = draw_composition(0, number)
    assert_lawful(composition, rng, choose_laws(rng))
