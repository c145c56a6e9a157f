"""The laws of compositions hold, as far as a run of the tests can wait.

`make laws` asks them of more compositions. One that fails here is asked again by its
number: `make laws ARGS="--first N --count 1"`.
"""

import pytest
from laws import Drawn, draw, judge, neutral, some
from tiers import tiers

pytestmark = pytest.mark.usefixtures("float64")

# A strategy of each kind, and the wrappers that must not change it.
KINDS = ["sync_sgd()", "bmuf(period=3)", "fedavg(period=3)", "easgd(period=3)"]
KINDS += ["paced(average(), SLOW)", "participating(diloco(period=4), HEAVY)"]


def assert_lawful(drawn, rng, asked):
    _, found = judge(drawn, rng, asked)
    broken = [f"{law}: {what}" for law, what in found if what]
    assert not broken, drawn


@pytest.mark.parametrize("kind", tiers(KINDS, KINDS[:2]))
def test_what_must_change_nothing_changes_nothing(kind):
    _, rng = draw(0, KINDS.index(kind))
    assert_lawful(Drawn(kind, 3, "momentum", "plain"), rng, [neutral])


@pytest.mark.parametrize("number", tiers(range(80), [0], range(1, 15)))
def test_random_compositions_are_lawful_or_refused(number):
    drawn, rng = draw(0, number)
    assert_lawful(drawn, rng, some(rng))
