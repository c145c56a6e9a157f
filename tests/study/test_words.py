"""The words of a report: a comparison, the line at the top, the numbers, the answer."""

from typing import Any

import numpy as np
import pytest

from experiments.command.terminal import duration
from experiments.study.analysis import against_baseline, rankings
from experiments.study.results import BY_DEFAULT, ONE_NOMINAL, Report, Row, leader
from experiments.study.runs import Tuning
from experiments.study.sentences import (
    answer,
    headline,
    in_words,
    laws,
    lead,
    numbers,
    share,
    titled,
)
from experiments.study.statistics import (
    ACCURACY,
    LOSS,
    Difference,
    Measure,
    Spread,
    spread,
)

MEGABYTE = 1_000_000


# One comparison.


def difference(
    mean, low: Any = None, high: Any = None, deviation=0.01, count=5, same_sign=True
):
    p = None if low is None else 0.5 if low <= 0 <= high else 1e-6
    return Difference(mean, low, high, deviation, count, same_sign, p)


FEW, SEEN = ": too few for an interval", " (5 seeds, 95 % interval)"
NAMELESS = {"named": False}
# What is said of a difference with an interval: its measure, its mean and both ends.
INTERVALS: dict[str, tuple[Any, ...]] = {
    "better by 0.80 points [0.50, 1.10]": (ACCURACY, 0.008, 0.005, 0.011),
    "worse by 0.80 points [0.50, 1.14]": (ACCURACY, -0.008, -0.0114, -0.005),
    "better by 0.0120 [0.0040, 0.0160]": (LOSS, -0.012, -0.016, -0.004),
    "worse by 13 [1, 26]": (LOSS, 13.2, 1.0, 25.6),
    "no difference seen: 0.15 points [-0.20, 0.50]": (ACCURACY, 0.0015, -0.002, 0.005),
    "no difference seen: -0.15 points [-0.50, 0.20]": (
        *(ACCURACY, -0.0015, -0.005, 0.002),
    ),
    "no difference seen: 0.15 points [0, 0.30]": (ACCURACY, 0.0015, 0.0, 0.003),
    "no difference seen: -0.0015 [-0.0050, 0.0020]": (LOSS, -0.0015, -0.005, 0.002),
}
# And of any: its measure, its mean, what else is known of it, what is added to the
# clause in a sentence, and how it is asked.
CLAUSES = {
    **{said: (by, figures, {}, SEEN) for said, (by, *figures) in INTERVALS.items()},
    # Without an interval.
    "ahead by 0.80 points in all 3 seeds": (ACCURACY, (0.008,), {"count": 3}, FEW),
    "behind by 0.0080 in both seeds": (LOSS, (0.008,), {"count": 2}, FEW),
    "ahead by 0.80 points in the mean of 4 seeds (not in all)": (
        *(ACCURACY, (0.008,), {"count": 4, "same_sign": False}, FEW),
    ),
    "no difference seen in the mean of 2 seeds": (
        *(ACCURACY, (0.0,), {"count": 2, "same_sign": False}, FEW),
    ),
    "behind by 0.80 points on one seed": (ACCURACY, (-0.008,), {"count": 1}, FEW),
    "ahead by 0.80 points in all 5 seeds": (
        *(ACCURACY, (0.008,), {"deviation": 0.0}),
        ": equal differences have no interval",
    ),
    "equal on one seed": (ACCURACY, (0.0,), {"count": 1, "deviation": None}, ""),
    "equal in all 5 seeds": (ACCURACY, (0.0, 0.0, 0.0), {"deviation": 0.0}, ""),
    # Without a winner.
    "above by 0.80 points [0.50, 1.10]": (
        *(ACCURACY, (0.008, 0.005, 0.011), {}, SEEN, NAMELESS),
    ),
    "below by 0.80 points in all 3 seeds": (
        *(ACCURACY, (-0.008,), {"count": 3}, FEW, NAMELESS),
    ),
}


@pytest.mark.parametrize("clause", CLAUSES)
def test_a_difference_in_words(clause):
    by, figures, about, note, *how = CLAUSES[clause]
    said = in_words(difference(*figures, **about), by, **dict(*how))
    assert (said.clause, said.sentence) == (clause, f"{clause}{note}.")


def test_no_comparison_in_words():
    said = in_words(None, ACCURACY).sentence
    assert said == "nothing to compare: no seed in common."


@pytest.mark.parametrize(
    ("p", "verdict", "more"),
    [
        (None, "better by 0.80 points", ""),
        (0.049, "better by 0.80 points", "p = 0.049"),
        (0.05, "no difference seen after correction: 0.80 points", "p = 0.05"),
        (1e-9, "better by 0.80 points", "p below 0.0001"),
    ],
)
def test_better_is_what_is_seen_after_correction(p, verdict, more):
    said = in_words(difference(0.008, 0.005, 0.011)._replace(p=p), ACCURACY, 3)
    assert said.clause == f"{verdict} [0.50, 1.10]"
    more = f" Corrected for 3 comparisons, {more}." if more else ""
    assert said.sentence == f"{said.clause} (5 seeds, 95 % interval).{more}"


def test_a_mean_far_below_the_last_digit_of_its_interval_is_0():
    said = in_words(difference(1e-8, -0.0069, 0.0069), ACCURACY)
    assert said.clause == "no difference seen: 0 points [-0.69, 0.69]"


@pytest.mark.parametrize(
    ("mean", "low", "high", "figures"),
    [
        (0.3, 0.0001, 0.6, "0.30 [0.0001, 0.60]"),
        (0.2, 1e-7, 0.4, "0.20 [1e-07, 0.40]"),
        (2.0, 1.9004, 2.0996, "2.00 [1.90, 2.10]"),
        (3e20, 2e20, 4e20, "3e+20 [2e+20, 4e+20]"),
        (150, 100, 350, "150 [100, 350]"),
    ],
)
def test_amounts_have_two_digits_of_the_error_and_never_vanish(
    mean, low, high, figures
):
    said = in_words(difference(mean, low, high), Measure("x", "x", True))
    assert said.clause == f"better by {figures}"


# Several rows. Seeds share the noise of their batches; what differs is said by `gains`.

SHARED = (-0.0015, -0.0007, 0.0, 0.0007, 0.0015)
BEST = (0.0, 0.0, 0.0, 0.0, 0.0)
WORSE = (-0.021, -0.019, -0.020, -0.022, -0.018)
UNSEEN = (-0.003, 0.001, -0.002, 0.002, -0.003)
DOUBTFUL = (-0.002, -0.0005, -0.001, -0.0002, -0.0013)  # p = 0.03, alone


def row(label, gains: Any = BEST, sends: Any = 1, mean=0.932, lost=0, **fields):
    """A row of as many seeds as gains, the first of which diverged, and megabytes."""
    final = {
        seed: mean + SHARED[seed] + gain
        for seed, gain in enumerate(gains)
        if seed >= lost
    }
    return Row(
        **{"label": label, "algo": label, "point": "", "loss": None, "tuned": {}},
        **{"lr": 0.1, "effective_lr": 0.1, "steps": 100, "syncs": None, "command": ""},
        seeds=len(gains),
        diverged=lost,
        measure=spread([*final.values()]) if final else None,
        bytes_per_worker=None if sends is None else MEGABYTE * sends,
        final=final,
    )._replace(**fields)


def answered(*rows, by=ACCURACY):
    return headline(rankings(rows, by)[""], by)


def report(rows, by=ACCURACY, terms="", baseline="", times=1.0):
    return Report(by, baseline, rows, rankings(rows, by), terms, times)


def line(*rows, by=ACCURACY, terms=""):
    return lead(report(rows, by, terms))


def told(*rows, baseline="sync_sgd", by=ACCURACY, terms="", is_given=False):
    """The rows as compared to the baseline, and the numbers beside the line."""
    named = terms != ONE_NOMINAL
    rows, _ = against_baseline(rows, baseline, by, named, is_given)
    return rows, numbers(report(rows, by, terms, baseline, 8.0))


LOST = row("diloco", lost=5)
A, SECOND = row("a"), row("b", UNSEEN)
AHEAD = "No difference seen: the mean of a is 0.10 points [-0.19, 0.39] above that of b"
# The line at the top, the rows, and the answer where it is asked.
ANSWERS: list[tuple[Any, ...]] = [
    (
        "bmuf has the best test accuracy",
        [row("sync_sgd", WORSE, 16), row("bmuf"), row("diloco", WORSE, mean=0.93)],
        "bmuf has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sync_sgd and diloco (95 % interval). "
        "It sent 1 MB per worker, 1/16 of what sync_sgd sent.",
    ),
    # The cheapest of those that are not told from the best.
    (
        "sync_sgd leads, but 1 of 2 others cannot be distinguished from it",
        [row("sync_sgd", sends=16), row("bmuf", UNSEEN), row("s", WORSE, 0.001)],
        "sync_sgd has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): better "
        "than s (95 % interval); no difference seen from bmuf. "
        "Of these, bmuf sent the least: 1 MB per worker, 1/16 of what sync_sgd sent.",
    ),
    # Of two alone 0.06; of six 0.1.
    (
        "bmuf leads, but 2 of 3 others cannot be distinguished from it",
        [
            *(row("bmuf"), row("diloco", DOUBTFUL), row("easgd", DOUBTFUL)),
            row("sync_sgd", WORSE, 16),
        ],
        "bmuf has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sync_sgd (95 % interval); different from diloco and easgd by its 95 % "
        "interval, but not after Holm's correction for 6 comparisons. bmuf, "
        "diloco and easgd each sent 1 MB per worker, 1/16 of what sync_sgd sent.",
    ),
    (
        "bmuf leads, but 3 seeds are too few to tell",
        [row("bmuf", BEST[:3]), row("sync_sgd", WORSE[:3], 16)],
        "bmuf has the best mean test accuracy, 93.13 ± 0.08 % (3 seeds): too few seeds "
        "to distinguish it from sync_sgd. Of these, bmuf sent the least: 1 MB per "
        "worker, 1/16 of what sync_sgd sent.",
    ),
    (
        "bmuf leads, but one seed is too few to tell",
        [row("bmuf", BEST[:1]), row("diloco", WORSE[:1])],
        "bmuf has the best mean test accuracy, 93.05 % (one seed): too few seeds to "
        "distinguish it from diloco. bmuf and diloco each sent 1 MB per worker.",
    ),
    (
        "bmuf: there is nothing to compare it to",
        [row("bmuf")],
        "bmuf has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): there is "
        "nothing to compare it to. It sent 1 MB per worker.",
    ),
    (
        "All runs diverged",
        [LOST, LOST._replace(label="bmuf")],
        "All runs of diloco and bmuf diverged.",
    ),
    (
        "bmuf: there is nothing to compare it to",
        [row("bmuf", lost=2), LOST],
        "bmuf (2 of 5 runs diverged) has the best mean test accuracy, 93.27 ± 0.08 % "
        "(3 seeds): all runs of diloco diverged. It sent 1 MB per worker.",
    ),
    # 12 of 200, with a period of 16: not the 16th that a reader expects.
    (
        "a has the best test accuracy",
        [row("a", sends=12, syncs=12, steps=200), row("sync_sgd", WORSE, 200)],
        "a has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): better than "
        "sync_sgd (95 % interval). It sent 12 MB per worker, about 1/17 of what "
        "sync_sgd sent (12 syncs in 200 steps).",
    ),
    # With the mean difference, which is 0.1, and its interval.
    (AHEAD, [A, SECOND]),
    (
        "No difference seen after correction: the mean of a is 0.100 points "
        "[0.013, 0.187] above that of b",
        [A, row("b", DOUBTFUL), row("c", UNSEEN, mean=0.931)],
    ),
    # One that is equal on all seeds shows nothing about the others.
    (AHEAD, [A, A._replace(label="same"), SECOND, row("c", UNSEEN, mean=0.93)]),
    ("No difference: a equals b in all seeds", [A, A._replace(label="b")]),
    # A mean that is higher by rounding does not lead.
    (
        "a leads, but one seed is too few to tell",
        [row("a", BEST[:1]), row("b", [1e-9])],
    ),
    # Of the seeds of both rows.
    ("a leads, but 4 seeds are too few to tell", [row("a"), row("b", WORSE, lost=1)]),
    (
        "a leads, but equal differences show nothing about chance",
        [row("a", [0.0] * 5), row("b", [-0.01] * 5)],
    ),
    (
        "a leads, but 5 of its 10 runs diverged",
        [A._replace(diverged=5, seeds=10), row("b", WORSE)],
    ),
    (
        "a leads, but 1 of 1 others may be better outside the range tried",
        [row("a"), row("b", WORSE, at_edge=["lr"])],
        "a has the best mean test accuracy, 93.20 ± 0.12 % (5 seeds): ahead of b (95 % "
        "interval), whose best values are at an edge of what was tried. It sent 1 MB "
        "per worker.",
    ),
]


@pytest.mark.parametrize("case", ANSWERS)
def test_line_and_answer_are_the_best_how_sure_that_is_and_what_it_costs(case):
    expected, rows, *said = case
    assert line(*rows) == expected
    assert answered(*rows) in said or not said


def test_rows_that_are_not_swept_are_one_comparison_at_all_values():
    swept = [row("c", WORSE)._replace(point=f"period={x}") for x in (4, 16, 64)]
    found = rankings([row("a"), row("b", WORSE), *swept], ACCURACY)
    assert {x.comparisons for x in found.values()} == {1 + 2 * 3}
    assert len(found) == 3


def test_an_answer_on_a_loss_takes_the_lowest():
    said = answered(row("sync_sgd"), row("bmuf", [-x for x in WORSE]), by=LOSS)
    assert said.startswith("sync_sgd has the best mean test loss, 0.9320 ± 0.0012 (5 ")


def test_an_answer_admits_that_the_best_mean_loses_on_the_seeds_in_common():
    best = row("bmuf", [0.0, 0.0, 0.0, 0.0, 0.0], measure=Spread(0.99, 0.1, 5))
    other = row("diloco", [-x for x in WORSE])
    assert "yet diloco is better on the seeds where both" in answered(best, other)
    assert line(best, other).endswith("the best test accuracy in the mean alone")


@pytest.mark.parametrize("count, named", [(8, "b7 (95 %"), (9, "than 9 others (95 %")])
def test_an_answer_counts_what_is_too_many_for_a_sentence(count, named):
    others = [row(f"b{i}", WORSE, mean=0.93) for i in range(count)]
    assert named in answered(row("bmuf"), *others)
    labels = ["bmuf", *(x.label for x in others)]
    assert titled(labels, "digits") == f"{count + 1} algorithms on digits"
    assert titled(labels[:2], "digits") == "bmuf and b0 on digits"


@pytest.mark.parametrize(
    ("sends", "cost"),
    [
        ((16, 1), "It sent 16 MB per worker."),
        ((None, 1), ""),  # a remark says so
        ((1, None), "It sent 1 MB per worker."),
        ((0, 1), "It sent 0 B per worker."),
        ((1, 2.7), "It sent 1 MB per worker, 37 % of what diloco sent."),
    ],
)
def test_what_a_clear_winner_costs(sends, cost):
    text = answered(row("bmuf", sends=sends[0]), row("diloco", WORSE, sends[1]))
    assert text.partition("(95 % interval).")[2].strip() == cost


@pytest.mark.parametrize(
    ("part", "words"),
    [(1 / 4096.1, "1/4,096"), (1 / 10.4, "about 1/10"), (0.37, "37 %"), (0.5, "1/2")],
)
def test_a_part_of_a_whole_in_words(part, words):
    assert share(part) == words


def test_the_line_says_the_terms():
    rows = [row("a"), row("b", WORSE)]
    assert line(*rows, terms=ONE_NOMINAL) == "No winner at one nominal learning rate"
    expected = "At the default rates: a has the best test accuracy"
    assert line(*rows, terms=BY_DEFAULT) == expected


SWEEP = [row("sync_sgd", UNSEEN), *(row("bmuf", BEST, point=f"n={x}") for x in (2, 4))]


def test_a_sweep_has_a_line_an_answer_and_numbers_of_its_own():
    assert line(*SWEEP) == "bmuf has the best mean test accuracy at every value of n"
    torn = [*SWEEP[:2], row("bmuf", WORSE, 3, point="n=4")]
    expected = "Best mean test accuracy: bmuf at 1, sync_sgd at 1 of 2 values of n"
    assert line(*torn) == expected
    said = answer(report(torn)).splitlines()
    assert [x.partition(" has")[0] for x in said] == ["n=2: bmuf", "n=4: sync_sgd"]
    assert told(*torn)[1] == [
        ("93.20 %", "test accuracy of bmuf (n 2)"),
        ("91.20 to 93.20 %", "test accuracy, lowest and highest"),
        ("1 MB to 3 MB", "the most that a worker sent"),
    ]


def test_p_values_are_corrected_over_all_values_of_a_sweep():
    """One comparison alone has p = 0.03, three have 0.1: no answer is sure."""
    gains = [-x for x in DOUBTFUL], (0.0, 0.005, -0.005, 0.001, 0.0), BEST
    rows = [row("sync_sgd")]
    rows += [
        row("bmuf", x, point=f"n={n}") for n, x in zip((2, 4, 8), gains, strict=True)
    ]
    said = answer(report(rows))
    assert "Holm's correction for 3 comparisons" in said
    assert "(95 % interval)" not in said


@pytest.mark.parametrize(
    ("gains", "difference", "sent"),
    [
        # bmuf is worse, and so is what it saves.
        (WORSE, ("2.00 points", "worse [1.80, 2.20]"), "16 MB"),
        (UNSEEN, ("no difference", "no difference seen [-0.39, 0.19]"), "1/16"),
        (WORSE[:1], ("2.1 points", "behind on one seed"), "1/16"),
    ],
)
def test_three_numbers_stand_beside_the_line(gains, difference, sent):
    amount, about = difference
    meaning = {
        "1/16": "of what sync_sgd sent: bmuf, 1 MB",
        "16 MB": "the most that a worker of sync_sgd sent",
    }
    assert told(row("sync_sgd", sends=16), row("bmuf", gains))[1] == [
        ("93.20 %", "test accuracy of sync_sgd"),
        (amount, f"bmuf against sync_sgd: {about}"),
        (sent, meaning[sent]),
    ]


def test_numbers_at_one_nominal_rate_name_no_winner():
    rows, found = told(row("sync_sgd"), row("bmuf", WORSE), terms=ONE_NOMINAL)
    assert found[:2] == [
        ("91.20 to 93.20 %", "test accuracy, lowest and highest"),
        ("8 times", "ratio of effective learning rates"),
    ]
    assert rows[1].comparison.clause.startswith("below by 2.00 points")
    text = answer(report(rows, terms=ONE_NOMINAL, times=8.0))
    assert text == (
        "At one nominal rate no winner is named: the largest effective learning rate "
        "is 8 times the smallest.\nThe mean test accuracy is 91.20 to 93.20 %. "
        "sync_sgd and bmuf each sent 1 MB per worker."
    )


def test_a_law_is_the_best_value_and_its_interval_at_each_value_of_the_sweep():
    known = {"label": "bmuf", "flag": "lr", "values": [0.1, 0.2], "scores": [0.5, None]}
    found = Tuning(**known, point="period=2", chosen=0.1, at_edge=True)
    wide = found._replace(point="period=4", chosen=0.2, low=0.1, high=0.2)
    lost = found._replace(point="period=8", scores=[None, None])
    assert laws([found._replace(low=0.1, high=0.1), wide, lost]) == (
        "Best lr: 0.1 at period=2, 0.2 at period=4",
        ["Best lr of bmuf: 0.1 at period=2, 0.2 [0.1, 0.2] at period=4."],
    )
    assert laws([found._replace(point="")]) == laws([lost]) == ("", [])


def test_runs_that_all_diverged_have_no_numbers():
    assert told(LOST, baseline="diloco")[1] == []


def test_who_is_at_the_edge_of_its_range_is_no_loser():
    for edges, kind, verdict in ([], "worse", "worse"), (["lr"], "edge", "below"):
        rows, _ = told(row("sync_sgd"), row("bmuf", WORSE, at_edge=edges))
        assert rankings(rows, ACCURACY)[""].kinds[kind] == [rows[1]]
        assert rows[1].comparison.verdict == verdict
        rows, _ = told(row("sync_sgd", WORSE, at_edge=edges), row("bmuf"))
        assert rows[1].comparison.verdict == ("above" if edges else "better")


def test_sentences_name_both_sides_and_what_diverged():
    rows = [row("sync_sgd"), row("bmuf", WORSE, lost=2, point="n=2"), LOST]
    compared, sentences = against_baseline(rows, "sync_sgd", ACCURACY, True, True)
    assert sentences == [
        "bmuf at n=2 against sync_sgd: behind by 2.0 points in all 3 seeds: too few "
        "for an interval. bmuf at n=2 diverged in 2 of 5 runs.",
        "diloco against sync_sgd: nothing to compare: no seed in common. diloco "
        "diverged in 5 of 5 runs.",
    ]
    verdicts = [x.comparison.verdict for x in compared]
    assert verdicts[0] == "baseline" and "baseline" not in verdicts[1:]


def null_study(rng, count):
    """Rows of equal algorithms, 5 seeds each, that share the noise of their batches."""
    finals = 0.9 + 0.01 * (rng.normal(size=5) + rng.normal(size=(count, 5)))
    return [
        row(f"a{i}")._replace(
            final=dict(enumerate(map(float, x))), measure=spread([*map(float, x)])
        )
        for i, x in enumerate(finals)
    ]


@pytest.mark.slow
def test_a_study_of_equal_algorithms_rarely_names_a_winner():
    """Corrected for the pairs with the best alone it did in 10 %."""
    rng, count, studies = np.random.default_rng(6), 6, 200
    answers = tables = given = 0
    for _ in range(studies):
        rows = null_study(rng, count)
        answers += bool(rankings(rows, ACCURACY)[""].kinds["worse"])
        for is_given in (False, True):
            found, _ = against_baseline(rows, "a0", ACCURACY, True, is_given)
            said = any(x.comparison.verdict in ("better", "worse") for x in found)
            given += said and is_given
            tables += said and not is_given
    assert answers / studies <= 0.05
    assert tables / studies <= 0.05
    assert given / studies <= 0.08


def test_the_best_is_the_first_of_the_best_means():
    low, high = Spread(0.1, None, 1), Spread(0.9, 0.1, 3)
    for by, *spreads in (ACCURACY, low, None, high, high), (LOSS, None, high, low, low):
        rows = [row("a", measure=x) for x in spreads]
        assert leader(rows, by) is rows[2]
    assert leader([x for x in rows if x.measure is None], ACCURACY) is None
    assert leader([], ACCURACY) is None


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0374, "37 ms"), (137, "2.3 min"), (59.9, "60 s"), (1e7, "120 days")],
)
def test_a_rough_time_has_two_digits(seconds, shown):
    assert duration(seconds, digits=2) == shown
