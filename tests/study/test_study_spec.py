"""The config of a study: algorithms, values, and the runs that follow."""

import json
import math
import shlex
from pathlib import Path

import numpy as np
import pytest
from test_study_analysis import write

from experiments.cli.errors import BadRequest
from experiments.cli.flags import words_of
from experiments.cli.words import flag_groups, parameter
from experiments.study import config, grid, search_space, spec
from experiments.study.grid import Loader, RunSet
from experiments.tasks.task import Data, Task
from experiments.training.config import RunConfig, parse


def config_of(*argv, task="digits"):
    """The checked config of a study's command line."""
    return config.read(["--task", task, *argv])


@pytest.fixture(scope="module")
def loader():
    """One for all tests: the data is read once."""
    return Loader()


def planned(loader, *argv):
    """The settings at each point of a study, by algorithm and point."""
    decided = config_of(*argv)
    return {
        (p.variant.label, p.point): loader.plan(p.common)[0].config
        for p in grid.run_sets(decided, loader)
    }


# Algorithms on the command line.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bmuf", [("bmuf", "bmuf", ())]),
        (
            "sync_sgd,bmuf , diloco",
            [(x, x, ()) for x in ("sync_sgd", "bmuf", "diloco")],
        ),
        (
            "sync_sgd, bmuf --block_lr 0.5 --nesterov",
            [
                ("sync_sgd", "sync_sgd", ()),
                (
                    "bmuf --block-lr 0.5 --nesterov",
                    "bmuf",
                    ("--block-lr", "0.5", "--nesterov"),
                ),
            ],
        ),
        (
            "A=bmuf --period=4, 'local SGD'=bmuf, a=b=bmuf",
            [
                ("A", "bmuf", ("--period=4",)),
                ("local SGD", "bmuf", ()),
                ("a=b", "bmuf", ()),
            ],
        ),
        ("mine=my.module:make", [("mine", "my.module:make", ())]),
        (
            "two=bmuf --devices '0,2', sync_sgd",
            [("two", "bmuf", ("--devices", "0,2")), ("sync_sgd", "sync_sgd", ())],
        ),
        ("A#1=bmuf, sync_sgd", [("A#1", "bmuf", ()), ("sync_sgd", "sync_sgd", ())]),
    ],
)
def test_algorithms_may_have_flags_and_labels(text, expected):
    assert spec.variants(text) == tuple(spec.Variant(*x) for x in expected)


def test_a_command_line_is_cut_before_each_flag():
    words = ["--lr", "0.1", "--no-nesterov", "--block_lr=2", "--clip-norm", "-1"]
    assert flag_groups(words) == [
        ("--lr", "0.1"),
        ("--no-nesterov",),
        ("--block-lr=2",),
        ("--clip-norm", "-1"),
    ]
    with pytest.raises(BadRequest, match="unexpected argument 'stray'"):
        flag_groups(["stray", "--lr", "0.1"])


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--no-nesterov", "nesterov"),
        ("--block-lr=2", "block_lr"),
        ("--lr", "lr"),
        ("--no-such=no-nesterov", "such"),
    ],
)
def test_a_flag_sets_the_parameter_of_its_name(flag, name):
    assert parameter(flag) == name


# Values.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=0.01:1.0:log:7", np.geomspace(0.01, 1, 7)),
        ("lr=1e-4:1e-1:log:4", np.geomspace(1e-4, 1e-1, 4)),
        ("momentum=0.5:0.9:linear:5", np.linspace(0.5, 0.9, 5)),
        ("x=-1:1:linear:3", np.linspace(-1, 1, 3)),
        ("period=4:64:log:5", np.array([4, 8, 16, 32, 64])),
    ],
)
def test_a_range_is_evenly_spaced_with_both_ends(text, expected):
    found = search_space.read("--tune", text)
    numbers = [float(value) for value in found.values]
    np.testing.assert_allclose(numbers, expected, rtol=5e-3)  # three digits
    assert (numbers[0], numbers[-1]) == (expected[0], expected[-1])
    assert found.bounds is not None


def test_whole_values_of_a_range_are_written_as_whole_numbers():
    """As --period reads them, however large they are."""
    found = search_space.read("--sweep", "period=256:4096:log:5")
    assert found.values == ("256", "512", "1024", "2048", "4096")


def test_a_list_is_taken_as_it_is_written():
    found = search_space.read("--sweep", " --outer_lr = 0.70, 1e-2 ,x")
    assert found == search_space.Range("outer_lr", ("0.70", "1e-2", "x"), None)
    assert search_space.read("--sweep", "outer-lr=1").flag == "outer_lr"


def test_a_finer_range_has_more_values_between_the_same_ends():
    coarse = search_space.read("--tune", "lr=0.01:1:log:3")
    fine = coarse.refined(5)
    numbers = [float(value) for value in fine.values]
    np.testing.assert_allclose(numbers, np.geomspace(0.01, 1, 15), rtol=5e-3)
    listed = search_space.read("--tune", "lr=0.1,0.2")
    assert listed.refined(5) == listed
    assert coarse.refined(1) == coarse


def test_values_of_a_narrow_range_differ():
    """Else fewer are tried than the report says."""
    found = search_space.read("--tune", "momentum=0.99:0.999:linear:4").refined(7)
    assert len(set(found.values)) == 28


# Which flags are whose.


def test_a_shared_flag_goes_to_those_that_have_it():
    decided = config_of(
        "--algos=sync_sgd,bmuf --period 2,diloco",
        *("--period", "8", "--block-lr", "0.5", "--lr", "0.1", "--no-nesterov"),
    )
    taken = {}
    for variant in decided.variants:
        parsed = parse(variant.argv)
        taken[variant.algo] = parsed.arguments
        assert parsed.lr == 0.1
        assert parsed.displacements
    assert "period" not in taken["sync_sgd"]
    assert taken["bmuf"]["period"] == 2  # its own, which wins
    assert taken["bmuf"]["block_lr"] == 0.5
    assert taken["diloco"]["period"] == 8
    assert not {"block_lr"} & taken["diloco"].keys()


@pytest.mark.parametrize(
    ("flag", "algos"),
    [
        ("lr", {"sync_sgd", "bmuf", "diloco"}),
        ("workers", {"sync_sgd", "bmuf", "diloco"}),
        ("model", {"sync_sgd", "bmuf", "diloco"}),  # of the task
        ("period", {"bmuf", "diloco"}),
        ("block_lr", {"bmuf"}),
        ("seed", set()),
        ("axis", set()),  # the harness passes it
        ("nonsense", set()),
    ],
)
def test_a_flag_applies_to_the_algorithms_that_take_it(flag, algos):
    decided = config_of("--algos=sync_sgd,bmuf,diloco")
    assert {v.algo for v in decided.variants if flag in v.known} == algos


# What is tried.

OUTER = "outer-lr=0.1:1:linear:5"


@pytest.mark.parametrize(
    "tune",
    [
        ["lr=0.01:1:log:3"],
        ["lr=0.01:1:log:3", OUTER],
        [OUTER, "lr=0.01:1:log:3", "momentum=0.1,0.5"],
        ["momentum=0.1,0.5", "lr=0.01:1:log:2", OUTER],
    ],
)
def test_all_algorithms_have_the_same_budget(tune):
    decided = config_of(
        "--algos=sync_sgd,diloco", *(w for t in tune for w in ("--tune", t))
    )
    given = [search_space.read("--tune", text) for text in tune]
    budget = math.prod(len(r.values) for r in given)
    for variant in decided.variants:
        own = variant.budget
        tried = list(search_space.combinations(own))
        assert len({tuple(each.items()) for each in tried}) == len(tried) == budget
        for each in own:
            (coarse,) = (r for r in given if r.flag == each.flag)
            values = {trial[each.flag] for trial in tried}
            assert values == set(each.values)
            assert {coarse.values[0], coarse.values[-1]} <= values


def test_the_first_range_is_the_finer_one_where_a_flag_is_lacking():
    decided = config_of(
        *("--algos=sync_sgd,diloco", "--tune", "momentum=0.1,0.5"),
        *("--tune", "lr=0.01:1:log:3", "--tune", OUTER),
        *("--tune", "weight-decay=0.001:0.1:log:2"),
    )
    sync, diloco = (variant.budget for variant in decided.variants)
    counts = {r.flag: len(r.values) for r in sync}
    assert counts == {"momentum": 2, "lr": 15, "weight_decay": 2}
    counts = {r.flag: len(r.values) for r in diloco}
    assert counts == {"momentum": 2, "lr": 3, "outer_lr": 5, "weight_decay": 2}


@pytest.mark.parametrize(
    ("tune", "tried"),
    [
        (["lr=0.01:1:log:50"], 2),  # its ends
        (["lr=0.01:1:log:50", "momentum=0:0.9:linear:9"], 4),  # its corners
        (["lr=0.1,0.2,0.3"], 3),
        (["period=1:8:linear:8"], 8),  # a whole number may have to divide something
        (["momentum=0.1,0.2", "period=1:8:linear:8"], 16),
    ],
)
def test_values_between_two_that_are_possible_are_not_tried_out(tune, tried):
    flags = [w for t in tune for w in ("--tune", t)]
    decided = config_of("--algos=diloco", *flags)
    found = list(decided.variants[0].decisive_trials())
    assert len(found) == tried
    for each in decided.tuned:
        values = {trial[each.flag] for trial in found}
        assert {each.values[0], each.values[-1]} <= values


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["--sweep=period=1,4"],
        ["--tune=lr=0.1,0.2", f"--tune={OUTER}", "--tune-seeds=2"],
        ["--tune=momentum=0.1,0.2", f"--tune={OUTER}", "--sweep=workers=1,2"],
    ],
)
def test_runs_are_counted_before_they_are_planned(loader, words):
    decided = config_of("--algos=sync_sgd,diloco", *words)
    made = 0
    for point in grid.run_sets(decided, loader):
        made += 5 + sum(len(trial.seeds) for trial in point.trials)
    assert config.count_runs(decided) == made


def test_one_range_may_have_a_name_for_each_algorithm(loader):
    """Else block momentum of three algorithms would be three dimensions of trials."""
    decided = config_of(
        *("--algos=sync_sgd,bmuf,slowmo,model_averaging", "--tune=lr=0.1:0.4:log:3"),
        "--tune=block-momentum|slow_momentum=0.5,0.9",
    )
    tried = {x.algo: [each.flag for each in x.budget] for x in decided.variants}
    assert tried == {
        "sync_sgd": ["lr"],
        "bmuf": ["lr", "block_momentum"],
        "slowmo": ["lr", "slow_momentum"],
        "model_averaging": ["lr"],
    }
    assert {x.trials for x in decided.variants} == {6}
    for point in grid.run_sets(decided, loader):
        assert len(point.trials) == 6
    again = config_of(
        "--algos=bmuf,slowmo", "--tune=slow_momentum|block_momentum=0.5,0.9"
    )
    assert again.variants[0].budget[0].flag == "block_momentum"


def test_each_name_of_a_range_may_have_values_of_its_own():
    words = "--algos=sync_sgd,bmuf,slowmo,powersgd", "--tune=lr=0.1:0.4:log:3"
    own = "block_momentum|slow_momentum=0.5,0.9|rank=1,4"
    decided = config_of(*words, f"--tune={own}")
    tried = {x.algo: x.budget[1:] for x in decided.variants}
    each = {"bmuf": "block_momentum", "slowmo": "slow_momentum"}
    assert tried.pop("sync_sgd") == []
    assert tried.pop("powersgd") == [search_space.Range("rank", ("1", "4"))]
    assert tried == {
        x: [search_space.Range(flag, ("0.5", "0.9"))] for x, flag in each.items()
    }
    assert {x.trials for x in decided.variants} == {6}
    other = config_of(*words, f"--tune={own.replace('1,4', '1,8')}")
    assert other.identity != decided.identity
    # A preset's range serves some of its algorithms alone.
    few = config_of("--algos=sync_sgd,bmuf", f"--tune={own}")
    assert few.variants[1].budget == [tried["bmuf"][0]]


def test_an_algorithm_without_any_tuned_flag_is_not_tried():
    decided = config_of("--algos=sync_sgd,diloco", "--tune", OUTER)
    own = decided.variants[0].budget
    assert (own, list(search_space.combinations(own))) == ([], [])
    assert config_of("--algos=bmuf").variants[0].budget == []


def test_runs_that_tune_hold_data_out_and_have_seeds_of_their_own(loader):
    decided = config_of(
        *("--algos=bmuf,diloco", "--tune", "lr=0.1,0.2", "--tune", OUTER),
        *("--tune-seeds", "2", "--sweep", "period=2,4"),
    )
    folders = set()
    for point in grid.run_sets(decided, loader):
        for trial in point.trials:
            assert trial.common.validation == 0.1
            assert trial.common.lr == float(trial.values["lr"])
            assert len(trial.seeds) == 2 and min(trial.seeds) >= 1000
            folders.add(trial.folder)
            assert all(f"{k}={v}" in trial.trial for k, v in trial.values.items())
            assert trial.common.arguments["period"] in (2, 4)
        assert point.common.validation is None and point.common.lr is None
        folders.add(point._replace(values={"lr": "0.2"}).folder)
    # Two points each: two trials of bmuf, which lacks the range, ten of diloco.
    assert len(folders) == 2 * (2 + 10) + 4


def test_labels_that_look_alike_as_folders_are_kept_apart(loader):
    decided = config_of("--algos=a+b=bmuf,a-b=sync_sgd,A/B=bmuf")
    found = {p.folder for p in grid.run_sets(decided, loader)}
    assert len(found) == 3
    assert all(not f.is_absolute() and ".." not in f.parts for f in found)


def test_a_run_set_knows_which_of_its_runs_are_done(tmp_path):
    common = RunConfig(data_dir=Path("my data"))
    runs = RunSet(spec.Variant("a", "bmuf"), 1, "", common, tmp_path, range(3))
    assert runs.missing() == [0, 1, 2] and runs.read().summaries == {}
    for seed in (0, 2):
        write(runs.run(seed), "bmuf", (0.1, 0.2, 0.3), seed=seed)
    (runs.folder / ".seed-1").mkdir()  # one that was stopped
    assert runs.missing() == [1]
    assert {k: x["seed"] for k, x in runs.read().summaries.items()} == {0: 0, 2: 2}
    assert [line["step"] for line in runs.read().lines[2]] == [10, 20, 30]
    words = ["--algo", "bmuf", "--task", "digits", "--data-dir", "my data"]
    assert shlex.split(runs.command) == ["python", "-m", "experiments.run", *words]


# A sweep.


def test_workers_are_swept_at_a_fixed_global_batch_and_steps(loader):
    found = planned(loader, "--algos=sync_sgd,bmuf", "--sweep", "workers=1,2,4,8")
    assert len(found) == 8
    for (_, point), s in found.items():
        assert point == f"workers={s.workers}"
        assert (s.batch_size, s.steps, s.lr) == (64, 480, 0.05)  # of the task


def test_with_a_workers_batch_the_samples_stay_and_the_rate_follows(loader):
    found = planned(
        loader,
        *("--algos=bmuf", "--sweep", "workers=2,1,8", "--worker-batch", "8"),
        *("--steps", "200", "--lr", "0.1"),
    )
    first = 2 * 8
    assert [s.workers for s in found.values()] == [2, 1, 8]
    for s in found.values():
        assert s.batch_size == 8 * s.workers
        assert s.steps * s.batch_size == 200 * first
        expected = 0.1 * s.batch_size / first
        assert s.lr == pytest.approx(expected, rel=1e-5)  # six digits


def test_samples_are_as_equal_as_whole_steps_allow(loader):
    found = planned(
        loader, "--algos=bmuf", "--sweep=batch-size=8,24,800", "--steps=100"
    )
    steps = [s.steps for s in found.values()]
    assert steps == [100, 33, 1]


def test_steps_may_be_swept_themselves(loader):
    found = planned(loader, "--algos=bmuf", "--sweep=steps=10,30", "--batch-size=16")
    assert [(s.steps, s.batch_size) for s in found.values()] == [(10, 16), (30, 16)]


def test_a_worker_batch_without_a_sweep_sets_the_global_batch(loader):
    found = planned(loader, "--algos=bmuf", "--workers=4", "--worker-batch=6")
    (s,) = found.values()
    assert (s.batch_size, s.steps) == (24, 480)


def test_an_algorithm_without_the_swept_flag_is_run_once(loader):
    found = planned(loader, "--algos=sync_sgd,bmuf", "--sweep=period=1,4")
    assert [*found] == [("sync_sgd", ""), ("bmuf", "period=1"), ("bmuf", "period=4")]
    assert {s.steps * s.batch_size for s in found.values()} == {480 * 64}


def test_a_swept_value_that_a_run_cannot_have_is_refused(loader):
    with pytest.raises(BadRequest, match="--workers must be a whole number"):
        planned(loader, "--algos=bmuf", "--sweep=workers=1,0")
    with pytest.raises(BadRequest, match="does not divide over 3 workers"):
        planned(loader, "--algos=bmuf", "--sweep=workers=1,3", "--batch-size=64")


def test_runs_are_those_of_their_command(loader):
    """The command in the report makes the point's runs, and so do jobs."""
    decided = config_of(
        *("--algos=bmuf --preset paper, NBM=bmuf --nesterov", "--model=mlp"),
        *("--sweep=workers=1,4", "--worker-batch=8", "--lr=0.3"),
        *("--tune=period=2,4", "--tune=momentum=0.1:0.9:linear:3", "--clip-norm=1e-3"),
    )
    for point in grid.run_sets(decided, loader):
        assert point.common.batch_size == 8 * point.common.workers
        for runs in (point, *point.trials):
            assert parse(shlex.split(runs.command)[3:]) == runs.common
            assert f"workers={runs.common.workers}" == point.point


@pytest.mark.parametrize(
    "words",
    [
        "--devices 0,1 --backend pmap",
        "--mesh fsdp=2,tensor=2 --workers 2 --schedule cosine",
        "--task spoken_digits --partition speaker --out a=b --export c.safetensors",
        "--algo sync_sgd --reduce int8 --task cifar10 --remat --b1 0.5",
        "--algo gossip --steps 7 --mix-opt-state",
        "--algo sign_sgd --momentum 0 --resume --checkpoint-every 3",
        "--algo streaming_diloco --cut bytes --preset paper",
    ],
)
def test_flags_made_of_a_config_say_it(words):
    config = parse(words.split())
    assert parse(words_of(config)) == config


# Data.


def drawn(seed: int, rows: int = 4) -> Task:
    """A task whose data follows the seed, as generated pictures do."""

    def load():
        x = np.random.default_rng(seed).normal(size=(rows, 2))
        return Data({"x": x}, {"x": x})

    return Task(
        init=lambda key: ((), ()),
        apply=lambda *_: ({}, ()),
        load=load,
        batch_size=4,
        steps=2,
        lr={"": 0.1},
        dispatch_steps=2,
    )


def test_data_is_read_once_for_runs_that_share_it(loader):
    _, data = loader.plan(parse(()))
    assert loader.plan(parse(["--lr=0.3", "--seed=7"]))[1] is data
    _, held = loader.plan(parse(["--validation=0.1"]))
    assert held.examples < data.examples


def test_data_that_follows_the_seed_is_that_of_each_seed():
    """Else a study's run would not be what its command makes."""
    task = f"{__name__}:drawn"
    for rows in (4, 8):
        loader = Loader()
        for seed in (0, 1):
            flags = f"--workers=2 --task={task} --rows={rows} --seed={seed}"
            config = parse(flags.split())
            _, own = loader.plan(config)
            _, fresh = Loader().plan(config)
            np.testing.assert_array_equal(own.train["x"], fresh.train["x"])


# What two studies of one folder must agree on.


def test_the_order_of_shared_flags_is_no_other_study():
    one = config_of("--lr", "0.1", "--workers", "4", "--tune-seeds", "2")
    two = config_of("--workers", "4", "--lr", "0.1")
    assert one.identity == two.identity
    assert json.loads(json.dumps(one.identity)) == one.identity


@pytest.mark.parametrize(
    "words",
    [
        ["--algos=bmuf,sync_sgd"],
        ["--algos=sync_sgd,A=bmuf"],
        ["--algos=sync_sgd,bmuf --nesterov"],
        ["--task=imagenet_synthetic"],
        ["--lr=0.2"],
        ["--sweep=period=1,2"],
        ["--tune=lr=0.1,0.2"],
        ["--worker-batch=4"],
    ],
)
def test_whatever_changes_a_run_is_another_study(words):
    assert config_of(*words).identity != config_of().identity


def test_how_to_tune_is_another_study_where_anything_is_tuned():
    tune, words = "--tune=lr=0.1,0.2", ["--tune-seeds=2"]
    assert config_of(tune, *words).identity != config_of(tune).identity
    untuned = "--lr=0.1"
    assert config_of(untuned, *words).identity == config_of(untuned).identity


@pytest.mark.parametrize("words", [[], ["--seeds=2"], ["--jobs=1", "--target=0.9"]])
def test_the_study_without_flags_tunes_the_rate_of_each_algorithm(words):
    """Else its headline would compare rates: bmuf's is eight times as high."""
    tuned = config_of(*words).tuned
    assert [each.flag for each in tuned] == ["lr"]
    rates = [float(x) for x in tuned[0].values]
    assert max(rates) / min(rates) >= 64


@pytest.mark.parametrize(
    "words",
    [
        ["--algos=bmuf"],
        ["--task=mnist"],
        ["--steps=9"],
        ["--sweep=workers=1,2"],
        ["--preset=local-steps"],
    ],
)
def test_a_study_of_ones_own_tunes_what_it_says(words):
    assert config_of(*words).tuned == ()
    tuned = config_of("--tune=lr=0.1,0.2", *words).tuned
    assert [each.flag for each in tuned] == ["lr"]
