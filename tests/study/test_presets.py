"""Published comparisons as data: what they say, and that their flags exist."""

import tomllib
from itertools import chain

import optax
import pytest
from support.small_tasks import SMALL, task_folder
from support.tiers import tiers

import syncalgos
from experiments.command import factories
from experiments.command.words import as_words, parameter
from experiments.study import config, presets, runs
from experiments.study.main import main as compare_main
from experiments.training.config import parse

NAMES = presets.NAMES


def read_preset(name):
    """A preset's file, read here once more."""
    return tomllib.loads(presets.FILES[name].read_text())


def under(name, *argv):
    """A preset with a user's flags."""
    return config.read_command_line(["--preset", name, *argv])


def on_small_data(decided):
    """The flags that let a preset run on data that is there."""
    if decided.task != "text":
        return [f"--data-dir={task_folder(decided.task)}"]
    flags = SMALL["text"].flags | {"tokens": 2000, "held_out": 0.1}
    return [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]


PUBLISHED = tomllib.loads(factories.PUBLISHED.read_text())


@pytest.mark.parametrize("name", PUBLISHED)
def test_papers_values_are_taken_for_own_flags(name):
    words = ["--algo", name, "--preset", "paper"]
    plain, paper_arguments = (parse(x).arguments for x in (words[:2], words))
    assert paper_arguments == plain | PUBLISHED[name]
    assert any(plain[flag] != value for flag, value in PUBLISHED[name].items())
    flag, value = next(iter(PUBLISHED[name].items()))
    flag_name = flag.replace("_", "-")
    flag_word = f"--no-{flag_name}" if value is True else f"--{flag_name}=1"
    assert parse([*words, flag_word]).arguments[flag] in (1, False)
    offered = {"learning_rate": 0.1, "optimizer": optax.sgd(0.1)}
    strategy = factories.call(
        factories.ALGORITHM, name, paper_arguments, offered, lambda strategy: None
    )
    assert isinstance(strategy, syncalgos.Strategy)


def test_papers_values_may_be_compared_with_defaults():
    three = config.read_command_line(
        ["--algos", "bmuf, diloco, published=diloco --preset paper"]
    )
    runs = [variant.config.arguments for variant in three.variants]
    assert [run["period"] for run in runs] == [16, 16, 500]
    published = config.read_command_line(
        ["--preset", "paper", "--algos", "bmuf, diloco"]
    )
    runs = [variant.config.arguments for variant in published.variants]
    assert [run["period"] for run in runs] == [16, 500]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_every_flag_of_a_preset_is_one_of_its_algorithms(name):
    decided = under(name)
    content = read_preset(name)["flags"]
    assert decided.seeds >= 3
    labels = [variant.label for variant in decided.variants]
    assert len(labels) == len(content["algos"])
    assert decided.baseline is None or decided.baseline in labels
    settings = {}
    for run in chain(*(points.values() for points in decided.points.values())):
        settings |= vars(run) | dict(run.arguments) | dict(run.task_arguments)
    for flag, value in content.items():
        name = flag.replace("-", "_")
        if name not in config.SETTINGS:
            assert settings[name] == value


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_a_preset_can_be_made_on_the_data(name):
    """A run's settings are refused, if at all, before anything is compiled."""
    decided = under(name, *on_small_data(under(name)))
    loader = runs.Loader()
    samples = set()
    for point in runs.run_sets(decided, loader):
        s = loader.plan(point.common)[0].config
        samples.add((point.variant.label, s.steps * s.batch_size))
    assert len(samples) == len(decided.variants)  # as many of each, if swept


@pytest.mark.parametrize(
    # The slow one has a sweep, a worker's batch and warm-up.
    "name",
    tiers(NAMES, slow=["large-batch"]),
)
def test_smallest_cell_of_a_study_runs(name, tmp_path):
    """One value of what is swept, one of what is tuned, one seed, few steps.

    Three algorithms at most, as tests of their own run each.
    """
    algos = read_preset(name)["flags"]["algos"]
    few_algos = [f"--algos={', '.join(algos[-3:])}"] if len(algos) > 3 else []
    decided = under(name, *few_algos)
    swept = [decided.swept] if decided.swept else []
    words = [f"--sweep={axis.flag}={axis.values[0]}" for axis in swept]
    words += [f"--tune={axis.flag}={axis.values[0]}" for axis in decided.tuned]
    runs = [variant.config for variant in decided.variants]
    period = max(run.arguments.get("period", 1) for run in runs)
    steps = max(4 * period, *(run.warmup_steps or 0 for run in runs))
    short = f"--steps={steps} --eval-every={2 * period} --dispatch-steps={period}"
    words += [
        *short.split(),
        "--seeds=1",
        "--tune-seeds=1",
        *on_small_data(decided),
        f"--out={tmp_path / 'out'}",
        *few_algos,
    ]
    assert compare_main(["--preset", name, *words]) == 0
    finals = (tmp_path / "out/finals.jsonl").read_text().splitlines()
    assert len(finals) == len(decided.variants) * (1 + bool(decided.tuned))


def test_the_atlases_have_the_algorithms_that_they_were_made_of():
    for name, count in {"atlas-mnist1d": 45, "atlas-spoken-digits": 24}.items():
        rows = read_preset(name)["flags"]["algos"]
        algos = [x.partition("=")[0].split()[0] for x in rows]
        assert algos == sorted(algos) and {*algos} <= {*syncalgos.ALGORITHMS}
        assert len({*algos}) == count


def test_goyals_rate_grows_with_the_batch():
    loader = runs.Loader()
    points = runs.run_sets(under("large-batch"), loader)
    settings = [loader.plan(point.common)[0].config for point in points]
    assert {s.batch_size // s.workers for s in settings} == {8}
    assert max(s.batch_size for s in settings) == 128
    for s in settings:
        assert s.lr / s.batch_size == pytest.approx(0.02 / 8)
    assert {s.warmup_steps for s in settings} == {0, 30}


# What a user says wins.


def test_a_users_flags_replace_the_presets_of_that_name():
    plain = under("unlike-data")
    changed = under("unlike-data", "--seeds", "2", "--period=3")
    assert (plain.seeds, changed.seeds) == (10, 2)
    assert changed.baseline == plain.baseline
    assert ("--period", "16") in plain.shared
    periods = [g for g in changed.shared if parameter(g[0]) == "period"]
    assert periods == [("--period=3",)]
    names = [(x.label, x.algo, x.words) for x in changed.variants]
    assert names == [(x.label, x.algo, x.words) for x in plain.variants]
    assert changed.tune == plain.tune


def test_algorithms_of_the_users_own_replace_all_and_the_presets_baseline():
    changed = under("unlike-data", "--algos=bmuf,diloco")
    assert [variant.label for variant in changed.variants] == ["bmuf", "diloco"]
    assert changed.baseline is None
    changed = under("unlike-data", "--algos=bmuf,diloco", "--baseline=diloco")
    assert changed.baseline == "diloco"


def test_a_users_value_replaces_what_a_preset_tries_of_it():
    """Else the value would be given in vain."""
    decided = under("unlike-data", "--lr", "0.01")
    assert decided.tuned == () and ("--lr", "0.01") in decided.shared
    decided = under("effective-rate", "--block-momentum=0.5")
    assert decided.swept is None and ("--block-momentum=0.5",) in decided.shared


def test_a_users_repeated_flags_replace_all_of_the_presets():
    words = ["--tune", "lr=0.1,0.2", "--tune=period=2,4"]
    plain = under("inner-momentum")
    decided = under("inner-momentum", *words)
    assert [r.flag for r in plain.tuned] == ["lr", "block_momentum"]
    assert [r.flag for r in decided.tuned] == ["lr", "period"]


def test_a_user_may_negate_what_a_preset_sets(tmp_path, monkeypatch):
    path = tmp_path / "own.toml"
    path.write_text(
        'flags = {nesterov = true, lr = 0.1, fused = true, algos = ["a", "b --c 1"]}'
    )
    monkeypatch.setitem(presets.FILES, "own", path)
    flags = {"nesterov": True, "lr": 0.1, "fused": True, "algos": "a, b --c 1"}
    assert presets.under("own", set()) == flags
    for words, name in (("--no-nesterov", "nesterov"), ("--lr=1", "lr")):
        flags_left = {k: x for k, x in flags.items() if k != name}
        assert presets.under("own", presets.list_set_names([(words,)])) == flags_left


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"nesterov": False}, ["--no-nesterov"]),
        ({"tune": ["x=1,2", "y=3,4"]}, ["--tune", "x=1,2", "--tune", "y=3,4"]),
        ({"seeds": 5, "lr": 0.1}, ["--seeds", "5", "--lr", "0.1"]),
        ({"task": "digits"}, ["--task", "digits"]),
    ],
)
def test_a_table_of_flags_reads_as_a_command_line(table, expected):
    assert as_words(table) == expected
