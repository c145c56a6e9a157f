"""Statements about several seeds: figures, sentences and the headline."""

import math
import random
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import ttest_1samp, ttest_rel

from experiments.study.analysis import formatting
from experiments.study.analysis.ranking import leader, ranked
from experiments.study.analysis.results import Row
from experiments.study.analysis.words import claims
from experiments.study.analysis.words.claims import clause, verdict
from experiments.study.analysis.words.headline import headline, titled
from experiments.study.analysis.words.lead import lead
from experiments.study.statistics import (
    ACCURACY,
    LOSS,
    Difference,
    Measure,
    Spread,
    band,
    corrected,
    paired,
    spread,
)

NAMES = ("bmuf", "model_averaging")
MEGABYTE = 1_000_000

FIGURES = st.floats(-1e3, 1e3, allow_subnormal=False)
BY_SEED = st.dictionaries(st.integers(0, 8), FIGURES, max_size=8)
COMPARED = settings(deadline=None, max_examples=200)


def by_seed(values):
    return dict(enumerate(values))


def difference(
    mean, low: Any = None, high: Any = None, deviation=0.01, count=5, same_sign=True
):
    p = None if low is None else 0.5 if low <= 0 <= high else 1e-6
    return Difference(mean, low, high, deviation, count, same_sign, p)


def compared(values, baseline) -> Any:
    return paired(values, baseline)


def ends(found: Any) -> Any:
    return found.low, found.high


def test_the_deviation_is_that_of_a_sample():
    # 1, 2, 3, 6: squares of distances from 3 sum up to 4 + 1 + 0 + 9 = 14
    assert spread([1, 2, 3, 6]) == Spread(3.0, pytest.approx(math.sqrt(14 / 3)), 4)


def test_one_seed_has_no_deviation():
    assert spread([0.5]) == Spread(0.5, None, 1)


def test_equal_figures_deviate_by_exactly_zero():
    assert spread([0.1, 0.1, 0.1]) == Spread(0.1, 0.0, 3)


@given(st.lists(FIGURES, min_size=2, max_size=8), st.randoms())
def test_a_spread_is_numpys_in_any_order(values, shuffle):
    shuffled = shuffle.sample(values, len(values))
    found = spread(values)
    assert spread(shuffled) == found
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert found.deviation == pytest.approx(np.std(values, ddof=1), abs=1e-9)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_a_mean_of_nothing_or_of_what_is_not_finite_is_refused(values):
    with pytest.raises(ValueError, match="finite values, one or more, got"):
        spread(values)


def test_only_seeds_that_both_have_are_paired():
    found = paired({0: 5.0, 1: 7.0, 3: 100.0}, {1: 4.0, 0: 4.0, 2: -100.0})
    # 5 - 4 and 7 - 4: mean 2, squares of distances from it 1 + 1
    assert found == Difference(2.0, None, None, pytest.approx(math.sqrt(2)), 2, True)


@pytest.mark.parametrize(
    ("values", "baseline"), [({}, {}), ({0: 1.0}, {}), ({0: 1.0}, {1: 1.0})]
)
def test_no_seed_in_common_is_no_difference(values, baseline):
    assert paired(values, baseline) is None


def test_five_pairs_have_an_interval_and_four_have_none():
    values = [0.9, 0.8, 0.7, 0.95, 0.85]
    zeros = by_seed([0.0] * 5)
    assert ends(paired(by_seed(values[:4]), zeros)) == (None, None)
    assert compared(by_seed(values[:4]), zeros).p is None
    # Mean 0.84, deviation 0.0962 of five: 2.776, from a printed table, × 0.0430
    low, high = ends(paired(by_seed(values), zeros))
    assert (low, high) == pytest.approx((0.84 - 0.1194, 0.84 + 0.1194), abs=1e-4)


@pytest.mark.parametrize("pairs", [5, 8, 12, 20])
@pytest.mark.parametrize("confidence", [0.8, 0.95])
def test_interval_and_p_value_are_those_of_scipys_paired_t_test(pairs, confidence):
    rng = np.random.default_rng(pairs)
    values, baseline = rng.exponential(size=(2, pairs))
    expected = ttest_rel(values, baseline)
    found: Any = paired(by_seed(values), by_seed(baseline), confidence)
    assert found.p == pytest.approx(expected.pvalue)
    assert ends(found) == pytest.approx(tuple(expected.confidence_interval(confidence)))


def test_more_confidence_is_a_wider_interval():
    values, zeros = by_seed([1.0, 2.0, 4.0, 3.0, 7.0, 5.0]), by_seed([0.0] * 6)
    at_80, at_95 = (ends(paired(values, zeros, level)) for level in (0.8, 0.95))
    assert at_95[0] < at_80[0] < at_80[1] < at_95[1]


@pytest.mark.parametrize("confidence", [0, 1, 95, math.nan])
def test_a_confidence_that_is_no_probability_is_refused(confidence):
    with pytest.raises(ValueError, match="between 0 and 1, got"):
        paired({0: 1.0}, {0: 1.0}, confidence)


def test_a_diverged_figure_among_the_pairs_is_refused():
    with pytest.raises(ValueError, match="finite"):
        paired({0: math.inf}, {0: 1.0})


@pytest.mark.parametrize("amount", [0.25, -0.25])
def test_equal_differences_have_no_interval(amount):
    """Five times one test example more: nothing is known of chance."""
    baseline = {seed: seed / 8 for seed in range(6)}
    values = {seed: x + amount for seed, x in baseline.items()}
    assert paired(values, baseline) == Difference(amount, None, None, 0.0, 6, True)


def test_identical_figures_are_certain_to_be_equal():
    values = {seed: seed / 8 for seed in range(6)}
    assert paired(values, values) == Difference(0.0, 0.0, 0.0, 0.0, 6, True, 1.0)


def test_differences_that_are_equal_but_for_rounding_have_no_interval():
    baseline = {seed: 0.1 * seed for seed in range(6)}
    found = compared({seed: x + 0.1 for seed, x in baseline.items()}, baseline)
    assert found.deviation > 0 and found.mean == pytest.approx(0.1)
    assert ends(found) == (None, None) and found.p is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [1, -1])
def test_a_bound_that_is_0_but_for_rounding_decides_nothing(dtype, side):
    # In examples of 360, shifted so that one end of the interval is at 0.
    baseline = {seed: float(dtype(341 / 360)) for seed in range(5)}
    gains = np.array([-1.0, 1, 2, 3, 5])
    gains -= ttest_1samp(gains, 0).confidence_interval().low
    values = by_seed(float(dtype((341 + side * gain) / 360)) for gain in gains)
    found = compared(values, baseline)
    assert 0 in ends(found)
    assert clause(found, ACCURACY).startswith("no difference seen")


@pytest.mark.parametrize(
    ("values", "same"),
    [([1, 2], True), ([-1, -2], True), ([1, -2], False), ([0, 2], False)],
)
def test_differences_have_one_sign_or_not(values, same):
    assert compared(by_seed(values), by_seed([0, 0])).same_sign == same


@COMPARED
@given(BY_SEED, BY_SEED, st.randoms())
def test_neither_the_order_of_seeds_nor_a_repetition_changes_a_difference(
    values, baseline, shuffle
):
    shuffled = dict(shuffle.sample(list(values.items()), len(values)))
    assert paired(shuffled, baseline) == paired(values, baseline)


@COMPARED
@given(BY_SEED, BY_SEED)
def test_a_difference_the_other_way_round_is_its_mirror_image(values, baseline):
    found, other = compared(values, baseline), compared(baseline, values)
    if found is None:
        assert other is None
        return
    assume(found.mean != 0)
    assert other.mean == -found.mean
    assert other.deviation == found.deviation
    if found.low is None:
        assert other.low is other.high is None
    else:
        assert (other.low, other.high) == pytest.approx((-found.high, -found.low))


@COMPARED
@given(
    st.lists(FIGURES, min_size=5, max_size=9),
    st.floats(-50, 50),
    st.sampled_from([1e-150, 1e-3, 1.0, 1e6]),
)
def test_an_interval_is_scipys_at_every_scale(values, shift, scale):
    values = [scale * (x + shift) for x in values]
    room = 2e-6 * max(map(abs, values))  # what counts as rounding: an end may be 0
    assume(np.ptp(values) > room > 1e-300 and room > 1e-100 * scale)  # squares
    found = compared(by_seed(values), by_seed([0.0] * len(values)))
    low, high = ttest_1samp(np.array(values) / scale, 0).confidence_interval()
    assert found.low == pytest.approx(scale * low, rel=1e-6, abs=room)
    assert found.high == pytest.approx(scale * high, rel=1e-6, abs=room)


def with_p(*values):
    return [
        None if p is None else difference(0.1, 0.05, 0.15)._replace(p=p) for p in values
    ]


@pytest.mark.parametrize(
    ("ps", "expected"),
    [
        # Holm's own rule: the least times 4, the next times 3, …, never falling.
        ([0.01, 0.04, 0.03, 0.005], [0.03, 0.06, 0.06, 0.02]),
        ([0.5, 0.6], [1.0, 1.0]),
        ([0.02], [0.02]),
        ([None, 0.02, None, 0.01], [None, 0.02, None, 0.02]),
        ([], []),
    ],
)
def test_p_values_are_corrected_as_holm_does(ps, expected):
    assert corrected(with_p(*ps)) == pytest.approx(expected)


def test_equal_algorithms_are_rarely_told_apart_in_a_whole_study():
    """Studies of 8 comparisons: one in 20, and without correction one in three."""
    rng, zeros = np.random.default_rng(0), by_seed([0.0] * 6)
    raw = held = 0
    for _ in range(2000):
        study = [paired(by_seed(x), zeros) for x in rng.normal(size=(8, 6))]
        raw += any(d.p < 0.05 for d in study if d and d.p is not None)
        held += any(p < 0.05 for p in corrected(study) if p is not None)
    assert raw / 2000 > 0.25
    assert held / 2000 == pytest.approx(0.05, abs=0.02)


EVERY_FORM = [
    (
        difference(0.008, 0.005, 0.011),
        ACCURACY,
        "bmuf is better than model_averaging by 0.80 points "
        "(5 seeds, 95 % interval 0.50 to 1.10)",
        "better by 0.80 points [0.50, 1.10]",
    ),
    (
        difference(-0.008, -0.0114, -0.005),
        ACCURACY,
        "bmuf is worse than model_averaging by 0.80 points "
        "(5 seeds, 95 % interval 0.50 to 1.14)",
        "worse by 0.80 points [0.50, 1.14]",
    ),
    (
        difference(-0.012, -0.016, -0.004),
        LOSS,
        "bmuf is better than model_averaging by 0.0120 "
        "(5 seeds, 95 % interval 0.0040 to 0.0160)",
        "better by 0.0120 [0.0040, 0.0160]",
    ),
    (
        difference(13.2, 1.0, 25.6, count=8),
        LOSS,
        "bmuf is worse than model_averaging by 13 (8 seeds, 95 % interval 1 to 26)",
        "worse by 13 [1, 26]",
    ),
    (
        difference(0.0015, -0.002, 0.005, same_sign=False),
        ACCURACY,
        "no difference seen between bmuf and model_averaging "
        "(5 seeds, 95 % interval -0.20 to 0.50 points)",
        "no difference seen [-0.20, 0.50]",
    ),
    (
        difference(-0.0015, -0.005, 0.002, same_sign=False),
        ACCURACY,
        "no difference seen between bmuf and model_averaging "
        "(5 seeds, 95 % interval -0.50 to 0.20 points)",
        "no difference seen [-0.50, 0.20]",
    ),
    (
        difference(0.0015, 0.0, 0.003, same_sign=False),
        ACCURACY,
        "no difference seen between bmuf and model_averaging "
        "(5 seeds, 95 % interval 0 to 0.30 points)",
        "no difference seen [0, 0.30]",
    ),
    (
        difference(0.0015, -0.002, 0.005, same_sign=False),
        LOSS,
        "no difference seen between bmuf and model_averaging "
        "(5 seeds, 95 % interval -0.0020 to 0.0050)",
        "no difference seen [-0.0020, 0.0050]",
    ),
    (
        difference(0.008, count=3),
        ACCURACY,
        "bmuf is ahead of model_averaging by 0.80 points in all 3 seeds: "
        "too few for an interval",
        "ahead by 0.80 points in all 3 seeds",
    ),
    (
        difference(0.008, count=2),
        LOSS,
        "bmuf is behind model_averaging by 0.0080 in both seeds: "
        "too few for an interval",
        "behind by 0.0080 in both seeds",
    ),
    (
        difference(0.008, count=4, same_sign=False),
        ACCURACY,
        "bmuf is ahead of model_averaging by 0.80 points in the mean of 4 seeds "
        "(not in all): too few for an interval",
        "ahead by 0.80 points in the mean of 4 seeds (not in all)",
    ),
    (
        difference(0.0, count=2, same_sign=False),
        ACCURACY,
        "no difference seen between bmuf and model_averaging in the mean of 2 seeds: "
        "too few for an interval",
        "no difference seen in the mean of 2 seeds",
    ),
    (
        difference(-0.008, deviation=None, count=1),
        ACCURACY,
        "bmuf is behind model_averaging by 0.80 points on one seed: "
        "nothing can be said of chance",
        "behind by 0.80 points on one seed",
    ),
    (
        difference(0.008, deviation=0.0),
        ACCURACY,
        "bmuf is ahead of model_averaging by 0.80 points in all 5 seeds: "
        "equal differences have no interval",
        "ahead by 0.80 points in all 5 seeds",
    ),
    (
        difference(0.0, 0.0, 0.0, deviation=0.0),
        ACCURACY,
        "bmuf and model_averaging are equal in all 5 seeds",
        "equal in all 5 seeds",
    ),
    (
        difference(0.0, deviation=None, count=1),
        ACCURACY,
        "bmuf and model_averaging are equal on one seed",
        "equal on one seed",
    ),
    (
        None,
        ACCURACY,
        "nothing to compare between bmuf and model_averaging: no seed in common",
        "nothing to compare: no seed in common",
    ),
]


@pytest.mark.parametrize(("found", "shown", "sentence", "cell"), EVERY_FORM)
def test_a_difference_in_words(found, shown, sentence, cell):
    assert verdict(*NAMES, found, shown) == sentence
    assert clause(found, shown) == cell


@pytest.mark.parametrize(
    ("p", "said"),
    [
        (None, "better by 0.80 points [0.50, 1.10]"),
        (0.049, "better by 0.80 points [0.50, 1.10]"),
        (0.05, "no difference seen after correction [0.50, 1.10]"),
    ],
)
def test_better_is_what_is_seen_after_correction(p, said):
    assert clause(difference(0.008, 0.005, 0.011), ACCURACY, p=p) == said


@pytest.mark.parametrize(
    ("found", "sentence", "cell"),
    [
        (
            difference(0.008, 0.005, 0.011),
            "bmuf is above model_averaging by 0.80 points "
            "(5 seeds, 95 % interval 0.50 to 1.10)",
            "above by 0.80 points [0.50, 1.10]",
        ),
        (
            difference(-0.008, count=3),
            "bmuf is below model_averaging by 0.80 points in all 3 seeds: "
            "too few for an interval",
            "below by 0.80 points in all 3 seeds",
        ),
        (
            difference(0.0015, -0.002, 0.005, same_sign=False),
            "no difference seen between bmuf and model_averaging "
            "(5 seeds, 95 % interval -0.20 to 0.50 points)",
            "no difference seen [-0.20, 0.50]",
        ),
    ],
)
def test_a_difference_without_a_winner_in_words(found, sentence, cell):
    assert verdict(*NAMES, found, ACCURACY, named=False) == sentence
    assert clause(found, ACCURACY, named=False) == cell


@pytest.mark.parametrize(
    ("mean", "low", "high", "figures"),
    [
        (0.3, 0.0001, 0.6, "0.30 (5 seeds, 95 % interval 0.0001 to 0.60)"),
        (0.2, 1e-7, 0.4, "0.20 (5 seeds, 95 % interval 1e-07 to 0.40)"),
        (2.0, 1.9004, 2.0996, "2.00 (5 seeds, 95 % interval 1.90 to 2.10)"),
        (3e20, 2e20, 4e20, "3e+20 (5 seeds, 95 % interval 2e+20 to 4e+20)"),
        (150, 100, 350, "150 (5 seeds, 95 % interval 100 to 350)"),
    ],
)
def test_amounts_have_two_digits_of_the_error_and_never_vanish(
    mean, low, high, figures
):
    text = verdict("a", "b", difference(mean, low, high), Measure("x", "x", True))
    assert text == f"a is better than b by {figures}"


@COMPARED
@given(BY_SEED, BY_SEED, st.booleans())
def test_a_verdict_the_other_way_round_says_the_same_with_the_opposite_word(
    values, baseline, higher_is_better
):
    found, other = compared(values, baseline), compared(baseline, values)
    assume(found is not None and found.mean != 0)
    shown = Measure("x", "x", higher_is_better)
    opposite = {"better": "worse", "worse": "better"}
    opposite |= {"ahead": "behind", "behind": "ahead"}
    said, turned = clause(found, shown), clause(other, shown)
    first, *others = said.split()
    if said.startswith("no difference seen ["):  # of this minus the other
        low, high = ends(found)
        shown_low, shown_high = map(float, turned.partition("[")[2][:-1].split(", "))
        room = 0.05 * (high - low) / 2 + 1e-9
        assert (shown_low, shown_high) == pytest.approx((-high, -low), abs=room)
    else:
        assert turned.split() == [opposite.get(first, first), *others]


@COMPARED
@given(BY_SEED, BY_SEED, st.sampled_from([1e-9, 1e-3, 1.0, 100.0, 1e9]))
def test_a_loss_is_judged_as_the_accuracy_of_the_opposite_sign(values, baseline, scale):
    def negative(figures):
        return {seed: -x for seed, x in figures.items()}

    loss, score = (Measure("x", "x", higher, scale) for higher in (False, True))
    as_loss = clause(paired(values, baseline), loss)
    as_score = clause(paired(negative(values), negative(baseline)), score)
    if as_loss.startswith("no difference seen ["):  # of figures of opposite signs
        as_loss, as_score = (x.partition(" [")[0] for x in (as_loss, as_score))
    assert as_loss == as_score


def null_study(rng, count):
    """Rows of equal algorithms, 5 seeds each, that share the noise of their batches."""
    figures = 0.9 + 0.01 * (rng.normal(size=5) + rng.normal(size=(count, 5)))
    return [
        contender(f"a{i}", float(own.mean()))._replace(final=by_seed(map(float, own)))
        for i, own in enumerate(figures)
    ]


@pytest.mark.parametrize(("count", "studies"), [(3, 400), (6, 200), (12, 60)])
def test_a_study_of_equal_algorithms_rarely_names_a_winner(count, studies):
    """Corrected for the pairs with the best alone it did in 6, 10 and 11 %."""
    rng = np.random.default_rng(count)
    headlines = tables = given = 0
    for _ in range(studies):
        rows = null_study(rng, count)
        headlines += bool(ranked(rows, ACCURACY).kinds["worse"])
        for is_given in (False, True):
            found, _ = claims.compared(rows, "a0", ACCURACY, True, is_given)
            said = any(x.verdict.startswith(("better", "worse")) for x in found)
            given += said and is_given
            tables += said and not is_given
    assert headlines / studies <= 0.05
    assert tables / studies <= 0.05
    assert given / studies <= 0.08  # 30 % for 12 without a correction


def contender(label, mean, found=None, sends=MEGABYTE, diverged=0, count=5):
    """A row of the table, with its difference to the best."""
    return Row(
        **{"label": label, "algo": label, "point": "", "seeds": count},
        **{"diverged": diverged, "loss": None, "difference": None, "verdict": ""},
        **{"lr": 0.1, "effective_lr": 0.1, "steps": 100, "tuned": {}, "syncs": None},
        **{"seconds": {}, "to_target": {}, "steps_to_target": None, "command": ""},
        measure=None if mean is None else Spread(mean, 0.0012, count - diverged),
        bytes_per_worker=sends,
        to_best=found,
    )


WORSE = difference(-0.02, -0.03, -0.01)
UNSEEN = difference(-0.001, -0.003, 0.001)
FEW = difference(-0.001, count=3)


def accuracy_headline(*contenders):
    return headline(ranked(contenders, ACCURACY), ACCURACY)


def test_who_is_at_the_edge_of_its_range_is_no_loser():
    best, other = contender("bmuf", 0.932), contender("sync_sgd", 0.91, WORSE)
    edge = other._replace(at_edge=["lr"])
    for row, kind in (other, "worse"), (edge, "edge"):
        assert ranked([best, row], ACCURACY).kinds[kind] == [row]
    assert lead({"": ranked([best, edge], ACCURACY)}, ACCURACY, "") == (
        "bmuf leads, but 1 of 1 others may be better beyond what was tried"
    )


def test_a_headline_of_a_clear_winner():
    assert accuracy_headline(
        contender("sync_sgd", 0.91, WORSE, 16 * MEGABYTE),
        contender("bmuf", 0.932),
        contender("diloco", 0.9, WORSE),
    ) == (
        "bmuf has the best test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sync_sgd and diloco (95 % interval). "
        "It sends 1 MB per worker, 1/16 of what sync_sgd sends."
    )


@pytest.mark.parametrize("count, named", [(8, "b7 (95 %"), (9, "than 9 others (95 %")])
def test_a_headline_counts_what_is_too_many_for_a_sentence(count, named):
    others = [contender(f"b{i}", 0.91, WORSE) for i in range(count)]
    assert named in accuracy_headline(contender("bmuf", 0.932), *others)
    labels = ["bmuf", *(row.label for row in others)]
    assert titled(labels, "digits") == f"{count + 1} algorithms on digits"
    assert titled(labels[:2], "digits") == "bmuf and b0 on digits"


def test_a_headline_says_how_few_syncs_make_a_share():
    """12 of 200, with a period of 16: not the 16th that a reader expects."""
    bmuf = contender("bmuf", 0.932, None, 12 * MEGABYTE)
    assert accuracy_headline(
        contender("sync_sgd", 0.91, WORSE, 200 * MEGABYTE),
        bmuf._replace(syncs=12, steps=200),
    ).endswith(
        "It sends 12 MB per worker, about 1/17 of what sync_sgd sends: 12 syncs in 200 "
        "steps."
    )


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0374, "37 ms"), (137, "2.3 min"), (59.9, "60 s"), (1e7, "120 days")],
)
def test_a_rough_time_has_two_digits(seconds, shown):
    assert formatting.duration(seconds, digits=2) == shown


def test_a_headline_names_the_cheapest_of_those_not_told_from_the_best():
    assert accuracy_headline(
        contender("sync_sgd", 0.932, None, 16 * MEGABYTE),
        contender("bmuf", 0.931, UNSEEN),
        contender("sign", 0.9, WORSE, 1000),
    ) == (
        "sync_sgd has the best test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sign (95 % interval); no difference seen to bmuf. "
        "Of these, bmuf sends least: 1 MB per worker, 1/16 of what sync_sgd sends."
    )


def test_a_headline_admits_what_does_not_survive_correction():
    """p = 0.03 alone, 0.06 as the second of two."""
    doubtful = difference(-0.001, -0.002, -0.0001)._replace(p=0.03)
    assert accuracy_headline(
        contender("bmuf", 0.932),
        contender("diloco", 0.931, doubtful),
        contender("easgd", 0.931, doubtful),
        contender("sync_sgd", 0.91, WORSE, 16 * MEGABYTE),
    ) == (
        "bmuf has the best test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sync_sgd (95 % interval); better than diloco and easgd by the 95 % interval "
        "of each alone, but not after Holm's correction for 3 comparisons. Each of "
        "these sends 1 MB per worker, 1/16 of what sync_sgd sends."
    )


def test_a_headline_over_few_seeds_tells_nothing_apart():
    assert accuracy_headline(
        contender("sync_sgd", 0.931, FEW, 16 * MEGABYTE, count=3),
        contender("model_averaging", 0.93, FEW, count=3),
        contender("bmuf", 0.932, count=3),
    ) == (
        "bmuf has the best test accuracy, 93.20 ± 0.12 % (3 seeds): too few seeds to "
        "tell it from sync_sgd and model_averaging. Of these, bmuf and model_averaging "
        "send least: 1 MB per worker, 1/16 of what sync_sgd sends."
    )


def test_a_headline_on_a_loss_takes_the_lowest():
    contenders = [
        contender("sync_sgd", 0.5),
        contender("bmuf", 0.6, difference(0.1, 0.05, 0.15)),
    ]
    text = headline(ranked(contenders, LOSS), LOSS)
    assert text == (
        "sync_sgd has the best test loss, 0.5000 ± 0.0012 (5 seeds): better than bmuf "
        "(95 % interval). It sends 1 MB per worker, as every other does."
    )


def test_a_headline_of_one_seed():
    one = contender("bmuf", 0.932)._replace(measure=Spread(0.932, None, 1))
    assert accuracy_headline(one, contender("diloco", 0.93, FEW)) == (
        "bmuf has the best test accuracy, 93.2 % (one seed): too few seeds to tell it "
        "from diloco. Each of these sends 1 MB per worker."
    )


def test_a_headline_of_a_single_algorithm():
    assert accuracy_headline(contender("bmuf", 0.932)) == (
        "bmuf has the best test accuracy, 93.20 ± 0.12 % (5 seeds): there is nothing "
        "to compare it to. It sends 1 MB per worker."
    )


def test_a_headline_of_diverged_runs():
    lost = contender("diloco", None, diverged=5)
    assert accuracy_headline(lost) == "All runs of diloco diverged."
    assert accuracy_headline(lost, lost._replace(label="bmuf")) == (
        "All runs of diloco and bmuf diverged."
    )
    assert accuracy_headline(
        contender("bmuf", 0.932, diverged=2, count=7),
        lost,
        contender("slowmo", 0.9, WORSE, diverged=1),
    ) == (
        "bmuf (2 of 7 runs diverged) has the best test accuracy, 93.20 ± 0.12 % "
        "(5 seeds): better than slowmo (1 of 5 runs diverged) (95 % interval); "
        "all runs of diloco diverged. It sends 1 MB per worker, as every other does."
    )


def test_a_headline_admits_that_the_best_mean_loses_on_the_seeds_in_common():
    assert accuracy_headline(
        contender("bmuf", 0.932, diverged=2),
        contender("diloco", 0.931, difference(0.002, 0.001, 0.003)),
    ).startswith(
        "bmuf (2 of 5 runs diverged) has the best test accuracy, 93.20 ± 0.12 % "
        "(3 seeds): yet diloco is better where both have a result."
    )


@pytest.mark.parametrize(
    ("sends", "cost"),
    [
        ((16, 1), "It sends 16 MB per worker, the most; diloco sends least, 1 MB."),
        ((None, 1), "What bmuf sent could not be counted."),
        ((1, None), "It sends 1 MB per worker."),
        ((0, 1), "It sends nothing, diloco 1 MB."),
        ((0, 0), "It sends nothing, as every other does."),
        ((1, 2.7), "It sends 1 MB per worker, 37 % of what diloco sends."),
        ((1, 10.4), "It sends 1 MB per worker, about 1/10 of what diloco sends."),
        ((1, 1.001), "It sends 1 MB per worker, nearly all of what diloco sends."),
        ((1, 4096.1), "It sends 1 MB per worker, 1/4,096 of what diloco sends."),
    ],
)
def test_what_a_clear_winner_costs(sends, cost):
    ours, theirs = (None if x is None else MEGABYTE * x for x in sends)
    text = accuracy_headline(
        contender("bmuf", 0.932, None, ours), contender("diloco", 0.9, WORSE, theirs)
    )
    assert text.partition("(95 % interval). ")[2] == cost


@pytest.mark.parametrize(
    ("sends", "cost"),
    [
        (
            (2, 1, None),
            "Of these, b sends least: 1 MB per worker, 1/2 of what a sends "
            "(what c sent could not be counted).",
        ),
        ((None, None, None), "What a, b and c sent could not be counted."),
        ((1, 1, 1), "Each of these sends 1 MB per worker."),
    ],
)
def test_what_it_costs_where_nothing_can_be_told_apart(sends, cost):
    a, b, c = (None if x is None else MEGABYTE * x for x in sends)
    text = accuracy_headline(
        contender("a", 0.932, None, a),
        contender("b", 0.931, UNSEEN, b),
        contender("c", 0.931, UNSEEN, c),
    )
    assert text.partition("no difference seen to b and c. ")[2] == cost


def test_the_best_is_the_first_of_the_best_means():
    low, high = Spread(0.1, None, 1), Spread(0.9, 0.1, 3)
    for by, *spreads in (ACCURACY, low, None, high, high), (LOSS, None, high, low, low):
        rows = [contender("a", 0.5, None)._replace(measure=x) for x in spreads]
        assert leader(rows, by) is rows[2]
    assert leader([x for x in rows if x.measure is None], ACCURACY) is None
    assert leader([], ACCURACY) is None


def test_a_band_is_the_mean_and_a_deviation_on_either_side():
    mean, low, high = band([[1.0, 10.0], [3.0, 10.0]])
    assert mean == [2.0, 10.0]
    assert low == pytest.approx([2 - math.sqrt(2), 10.0])
    assert high == pytest.approx([2 + math.sqrt(2), 10.0])


def test_a_band_goes_on_with_the_seeds_that_have_a_figure():
    mean, low, high = band([[1.0, None, 5.0, math.inf], [3.0, 4.0], [2.0, None]])
    assert (mean[0], low[0], high[0]) == (2.0, 1.0, 3.0)
    assert (mean[1], low[1], high[1]) == (4.0, 4.0, 4.0)
    assert (mean[2], low[2], high[2]) == (5.0, 5.0, 5.0)
    assert all(math.isnan(x[3]) for x in (mean, low, high))


@pytest.mark.parametrize("curves", [[], [[]], [[], []]])
def test_a_band_of_nothing_is_empty(curves):
    assert band(curves) == ([], [], [])


@given(
    st.lists(st.lists(st.none() | FIGURES, max_size=6), max_size=5), st.integers(0, 99)
)
def test_a_band_is_numpys_over_a_table_with_gaps_in_any_order(curves, seed):
    longest = max(map(len, curves), default=0)
    table = np.full((len(curves), longest), np.nan)
    for row, curve in zip(table, curves, strict=True):
        row[: len(curve)] = [np.nan if x is None else x for x in curve]
    with warnings.catch_warnings():  # numpy's, of columns without a figure
        warnings.simplefilter("ignore", RuntimeWarning)
        mean, deviation = np.nanmean(table, axis=0), np.nanstd(table, axis=0, ddof=1)
    deviation = np.where(np.isnan(deviation) & ~np.isnan(mean), 0, deviation)
    found = band(random.Random(seed).sample(curves, len(curves)))
    for actual, expected in zip(
        found, (mean, mean - deviation, mean + deviation), strict=True
    ):
        np.testing.assert_allclose(actual, expected if longest else [], atol=1e-9)
