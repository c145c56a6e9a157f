"""Runs that end before their algorithm has acted: told first, with a way out."""

import re

import pytest
from support.resumed_runs import run
from support.tiers import tiers

import syncalgos as sa
from experiments.training.config import parse
from experiments.training.plan import make_plan
from experiments.training.prepare import prepare

TINY = "--task support.tiny_tasks:drawing --workers 2 --eval-every 50"
ROLLING = "--task support.tiny_tasks:rolling"  # whose optimizer has momentum
WITHOUT_SYNC = (
    "bmuf first syncs after step 16, beyond these 10 steps: use --steps 16 or more, or "
    "--period 10 or less"
)


def never(words):
    """Says why a run never syncs; "" where it does."""
    return prepare(parse([*TINY.split(), *words.split()])).rounds.untrained


@pytest.mark.slow
def test_untrained_figures_are_told_first_before_and_after_the_run(tmp_path):
    ended = run(f"{TINY} --steps 10", tmp_path / "out").with_code(0)
    assert ended.summary["center_step"] == 0
    remark_lines = [x for x in ended.stderr.splitlines() if not x.startswith("step ")]
    assert (
        remark_lines[0]
        == f"the results will be those of the initial model: {WITHOUT_SYNC}"
    )
    assert remark_lines[1].startswith("bmuf on support.tiny_tasks:drawing")
    summary_lines = ended.stderr.partition("step 10/10")[2].splitlines()[1:]
    start = "the results are those of the initial model: "
    assert summary_lines == [start + WITHOUT_SYNC]


@pytest.mark.slow
@pytest.mark.parametrize("name", tiers(["co2", "diloco_x"], ["diloco_x"]))
def test_a_result_that_arrives_a_round_late_is_not_in_the_center(name):
    remark = (
        f"{name} first uses a sync after step 16, beyond these 9 steps: use --steps "
    )
    words = f"--algo {name} --period 8 --steps"
    assert never(f"{words} 9") == f"{remark}16 or more, or --period 4 or less"
    rounds = prepare(parse([*TINY.split(), *words.split(), "25"])).rounds
    assert [rounds.center_step(step) for step in (15, 16, 24, 25)] == [0, 8, 16, 16]


@pytest.mark.slow
def test_an_algorithm_that_sends_nothing_is_not_said_to_be_untrained():
    strategy = sa.Strategy(
        lambda params: params,
        sync=lambda r, w, step: (r, r.params),
        center=lambda _, w: w,
    )
    config = parse([*TINY.split(), "--steps", "8"])
    rounds = prepare(config, strategy=sa.every(strategy, 4)).rounds
    assert (rounds.untrained, rounds.center_step(8)) == ("", 8)
    assert "sends nothing" in rounds.unsynced


@pytest.mark.slow
def test_a_run_without_a_sync_says_so_first_where_the_mean_is_evaluated(tmp_path):
    ended = run(f"{TINY} --steps 10 --algo model_averaging", tmp_path / "out")
    assert ended.code == 0
    remark = WITHOUT_SYNC.replace("bmuf", "model_averaging")
    assert ended.stderr.splitlines()[0] == f"the workers will never sync: {remark}"
    assert ended.summary["syncs"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "remark"),
    [
        ("--steps 16", ""),
        ("--steps 10 --sync-until 2", ""),
        ("--steps 10 --workers 1", WITHOUT_SYNC),
        (
            "--steps 3 --period 100000",
            "bmuf does not sync in these 3 steps: use --period 3 or less",
        ),
    ],
)
def test_no_sync_is_told_where_a_center_waits_for_one(words, remark):
    assert never(words) == remark


# A first sync of fragments, and by clocks.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["streaming_diloco", "async_diloco"])
def test_the_way_out_of_any_algorithm_leads_out(name):
    """The period of a sync is found by counting what is sent."""
    remark = never(f"--steps 1 --algo {name}")
    [steps] = re.findall(r"--steps (\d+) or more", remark)
    assert int(steps) > 1
    assert never(f"--steps {int(steps) - 1} --algo {name}")
    assert not never(f"--steps {steps} --algo {name}")
    if "--period" in remark:  # 4 is what fragments divide
        assert not never(f"--steps 4 --algo {name} --period 4")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # Steps of one size take the rate of adam.
        ("--algo sign_sgd", {"lr": 0.05}),
        ("--algo signum", {"lr": 1e-3}),
        ("--algo one_bit_adam --dense-steps 3", {"lr": 1e-3}),
        ("--algo signum --optimizer adam", {"lr": 1e-3}),
        ("--algo signum --lr 0.2", {"lr": 0.2}),
        # Algorithms with a momentum do not take the task's as well.
        (f"{ROLLING} --algo demo", {"momentum": 0.9}),
        (f"{ROLLING} --algo demo --sign", {"momentum": None}),
        (f"{ROLLING} --algo signum", {"momentum": None}),
        (f"{ROLLING} --algo dgc", {"momentum": None}),
        (f"{ROLLING} --algo dgc --momentum 0.5", {"momentum": 0.5}),
    ],
)
def test_an_algorithm_takes_the_rate_and_the_momentum_that_suit_it(words, expected):
    config = make_plan(parse(words.split())).config
    assert {name: getattr(config, name) for name in expected} == expected


@pytest.mark.slow
def test_default_dense_steps_beyond_a_short_run_is_told(tmp_path):
    ended = run(f"{TINY} --steps 2 --algo post_local_sgd", tmp_path / "out")
    header = ended.with_code(0).stderr.splitlines()[0]
    assert header.startswith("--dense-steps 100 is not below --steps 2: all steps")


@pytest.mark.slow
def test_a_run_whose_loss_has_grown_says_so(tmp_path):
    ended = run(f"{TINY} --lr 1e9 --algo sync_sgd", tmp_path / "out")
    assert ended.code == 3
    [line] = [x for x in ended.stderr.splitlines() if x.startswith("diverged")]
    assert re.search(r"was [\d.e+]+, above 1000 times the", line) and " or " not in line
