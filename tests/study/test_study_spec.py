"""The config of a study: algorithms, values, and the runs that follow."""

import argparse
import json
import shlex
from pathlib import Path

import numpy as np
import pytest
from support.stored_runs import write_run

from experiments.command.flags import config_words
from experiments.command.words import as_words, flag_groups, parameter
from experiments.study import command_line, config, runs, variants
from experiments.study.runs import Loader, RunSet
from experiments.study.statistics import ACCURACY
from experiments.training.config import RunConfig, parse
from experiments.training.run_folder import default_out


def read_config(*argv, task="digits"):
    """The checked config of a study's command line."""
    return config.read_command_line(["--task", task, *argv])


@pytest.fixture(scope="module")
def loader():
    """One for all tests: the data is read once."""
    return Loader()


def planned(loader, *argv):
    """The settings at each point of a study, by algorithm and point."""
    return {
        (p.variant.label, p.point): loader.plan(p.common)[0].config
        for p in runs.run_sets(read_config(*argv), loader)
    }


# Algorithms on the command line.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("bmuf", "bmuf: bmuf"),
        ("sync_sgd,bmuf , diloco", "sync_sgd: sync_sgd; bmuf: bmuf; diloco: diloco"),
        ("bmuf --block_lr 0.5", "bmuf --block-lr 0.5: bmuf --block-lr 0.5"),
        ("A=bmuf --period=4, 'B C'=bmuf", "A: bmuf --period=4; B C: bmuf"),
        ("a=b=bmuf, A#1=bmuf", "a=b: bmuf; A#1: bmuf"),
        ("mine=my.module:make", "mine: my.module:make"),
        ("A=bmuf --devices '0,2', B=bmuf", "A: bmuf --devices 0,2; B: bmuf"),
    ],
)
def test_algorithms_may_have_flags_and_labels(text, expected):
    labelled_words = [
        f"{x.label}: {' '.join([x.algo, *x.words])}"
        for x in command_line.read_algorithms(text)
    ]
    assert "; ".join(labelled_words) == expected


def test_a_command_line_is_cut_before_each_flag_which_sets_a_parameter():
    words = ["--lr", "0.1", "--no-nesterov", "--block_lr=2", "--clip-norm", "-1"]
    groups = [("--lr", "0.1"), ("--no-nesterov",), ("--block-lr=2",)]
    groups += [("--clip-norm", "-1")]
    assert flag_groups(words) == groups
    names = [parameter(flag) for flag, *_ in groups]
    assert names == ["lr", "nesterov", "block_lr", "clip_norm"]
    assert parameter("--no-such=no-nesterov") == "such"


# Values.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("lr=0.01:1.0:log:7", np.geomspace(0.01, 1, 7)),
        ("lr=1e-4:1e-1:log:4", np.geomspace(1e-4, 1e-1, 4)),
        ("momentum=0.5:0.9:linear:5", np.linspace(0.5, 0.9, 5)),
        ("x=-1:1:linear:3", np.linspace(-1, 1, 3)),
    ],
)
def test_a_range_is_evenly_spaced_with_both_ends(text, expected):
    axis = command_line.parse_axis("--tune", text)
    numbers = [float(value) for value in axis.values]
    np.testing.assert_allclose(numbers, expected, rtol=5e-3)  # three digits
    assert (numbers[0], numbers[-1]) == (expected[0], expected[-1])
    assert axis.bounds is not None


def test_whole_values_of_a_range_are_written_as_whole_numbers():
    """As --period reads them, however large they are."""
    axis = command_line.parse_axis("--sweep", "period=256:4096:log:5")
    assert axis.values == ("256", "512", "1024", "2048", "4096")


def test_a_list_is_taken_as_it_is_written():
    axis = command_line.parse_axis("--sweep", " --outer_lr = 0.70, 1e-2 ,x")
    assert axis == variants.Axis("outer_lr", ("0.70", "1e-2", "x"), None)
    assert command_line.parse_axis("--sweep", "outer-lr=1").flag == "outer_lr"


def test_values_of_a_narrow_range_differ():
    """Else fewer are tried than the report says."""
    axis = command_line.parse_axis("--tune", "momentum=0.99:0.999:linear:28")
    assert len(set(axis.values)) == 28


def test_values_beyond_an_end_and_near_the_best_follow_a_range():
    axis = command_line.parse_axis("--tune", "lr=0.1:0.4:log:3+4")
    assert (axis.values, axis.near) == (("0.1", "0.2", "0.4"), 4)
    tried_values = {"0.1", "0.2", "0.4"}
    ends = [
        axis.further_values(tried_values, best, is_near=False)
        for best in ("0.1", "0.2", "0.4")
    ]
    assert ends == [("0.05",), (), ("0.8",)]
    assert (
        axis.further_values({*tried_values, *"1234"}, "4", is_near=False)
        == (
            # four beyond are enough
        )
    )
    assert axis.near_seeds == 0
    seeded_axis = command_line.parse_axis("--tune", "lr=0.1:0.4:log:3+4x25")
    assert (seeded_axis.values, seeded_axis.near, seeded_axis.near_seeds) == (
        axis.values,
        4,
        25,
    )
    assert seeded_axis.record == axis.record  # a folder is continued with more seeds
    near = ("0.139", "0.167", "0.24", "0.288")
    assert axis.further_values(tried_values, "0.2", is_near=True) == near
    assert axis.further_values({*tried_values, "0.240"}, "0.2", is_near=True) == (
        *near[:2],
        near[3],
    )
    period_axis = command_line.parse_axis("--tune", "period=2:8:log:3+3")
    assert period_axis.further_values(period_axis.values, "8", is_near=False) == ("16",)
    assert period_axis.further_values(period_axis.values, "4", is_near=True) == (
        "3",
        "5",
        "6",
    )


# Which flags are whose.


def test_a_shared_flag_goes_to_those_that_have_it():
    decided = read_config(
        "--algos=sync_sgd,bmuf --period 2,diloco",
        *("--period", "8", "--block-lr", "0.5", "--lr", "0.1", "--no-nesterov"),
    )
    arguments_by_algo = {}
    for variant in decided.variants:
        arguments_by_algo[variant.algo] = variant.config.arguments
        assert variant.config.lr == 0.1
        assert variant.config.displacements
    assert "period" not in arguments_by_algo["sync_sgd"]
    assert arguments_by_algo["bmuf"]["period"] == 2  # its own, which wins
    assert arguments_by_algo["bmuf"]["block_lr"] == 0.5
    assert arguments_by_algo["diloco"]["period"] == 8
    assert not {"block_lr"} & arguments_by_algo["diloco"].keys()


def test_a_flag_applies_to_the_algorithms_that_take_it():
    takers = {
        **dict.fromkeys(("lr", "workers"), "sync_sgd bmuf diloco"),
        "model": "sync_sgd bmuf diloco",  # of the task
        "period": "bmuf diloco",
        "block_lr": "bmuf",
        **dict.fromkeys(("seed", "axis", "nonsense"), ""),  # or the harness's
    }
    decided = read_config("--algos=sync_sgd,bmuf,diloco")
    for flag, expected in takers.items():
        readers = [x.algo for x in decided.variants if flag in x.readers]
        assert " ".join(readers) == expected, flag


# What is tried.

OUTER = "outer-lr=0.1:1:linear:5"


def test_all_algorithms_try_the_same_values_of_the_flags_that_they_have():
    tune = "momentum=0.1,0.5", "lr=0.01:1:log:3", OUTER, "weight-decay=0.001:0.1:log:2"
    decided = read_config("--algos=sync_sgd,diloco", *(f"--tune={x}" for x in tune))
    axes_in_order = [command_line.parse_axis("--tune", text) for text in tune]
    axes = {axis.flag: axis for axis in axes_in_order}
    sync, diloco = decided.variants
    assert diloco.tuned == [*axes.values()]
    assert sync.tuned == [x for name, x in axes.items() if name != "outer_lr"]
    assert (sync.trials, diloco.trials) == (2 * 3 * 2, 2 * 3 * 5 * 2)


def followed(study, loader, score):
    """The values of each batch of further trials, made with a score of each."""
    (run_set,) = runs.run_sets(study, loader)
    further = runs.further_trials(study, loader, run_set)
    batches = []
    trials = run_set.trials
    while trials is not None:
        for x in trials:
            accuracy = score(*map(float, x.values.values()))
            write_run(x.seed_folder(x.seeds[0]), "sync_sgd", (0.1, 0.2, accuracy))
        batches.append([tuple(x.values.values()) for x in trials])
        trials = next(further, None)
    return [*filter(None, batches[1:])]


@pytest.mark.parametrize(
    ("peak", "expected"),
    [
        # The end of the range moves until the best lies inside, then values near it.
        (0.9, [["0.8"], ["1.6"], ["0.556", "0.667", "0.96", "1.15"]]),
        (0.2, [["0.139", "0.167", "0.24", "0.288"]]),
        # Not for ever.
        (99, [["0.8"], ["1.6"], ["3.2"], ["6.4"], ["4.44", "5.33", "7.68", "9.22"]]),
    ],
)
def test_an_optimum_at_an_end_is_followed_and_then_refined(
    loader, tmp_path, peak, expected
):
    """The same values of the other flag stand beside each."""
    tune = "--tune=lr=0.1:0.4:log:3+4", "--tune=momentum=0.1,0.5"
    decided = read_config("--algos=sync_sgd", *tune, f"--out={tmp_path}", "--seeds=1")

    def score(lr, momentum):
        return 0.9 - abs(np.log(lr / peak)) / 20 - momentum / 10

    *ends, near_values = followed(decided, loader, score)
    assert ends == [[(x, "0.1"), (x, "0.5")] for (x,) in expected[:-1]]
    assert near_values == [(x, "0.1") for x in expected[-1]]


def play_tuning(decided, loader, score):
    """The trials of a row once all have ended, and those that each turn added.

    The accuracy of a run is score(lr, seed).
    """
    first_row = runs.run_sets(decided, loader)[0]
    further = runs.further_trials(decided, loader, first_row)
    row = first_row
    turns = []
    turn_trials = first_row.trials
    while turn_trials is not None:
        for trial_runs in turn_trials:
            for seed in trial_runs.missing():
                accuracy = score(float(trial_runs.values["lr"]), seed)
                write_run(
                    trial_runs.seed_folder(seed), "sync_sgd", (0.1, 0.2, accuracy)
                )
        turns.append({x.values["lr"]: len(x.seeds) for x in turn_trials})
        row = row._replace(trials=runs.join_trials(row.trials, turn_trials))
        turn_trials = next(further, None)
    return row, turns


def test_more_seeds_decide_among_the_values_near_the_best(loader, tmp_path):
    """The first two seeds prefer 0.2, and all six 0.4: the window moves to it."""
    words = "--algos=sync_sgd --seeds=1 --tune-seeds=2 --tune=lr=0.1:0.4:log:3+2x6"
    decided = read_config(*words.split(), f"--out={tmp_path}")

    def score(lr, seed):
        peak = 0.2 if seed < runs.FIRST_TUNING_SEED + 2 else 0.4
        return 0.9 - abs(np.log(lr / peak)) / 20

    row, turns = play_tuning(decided, loader, score)
    assert [x for x in turns if x] == [
        {"0.1": 2, "0.2": 2, "0.4": 2},
        {"0.167": 2, "0.24": 2},
        # Two of the six seeds exist.
        {"0.2": 4, "0.167": 4, "0.24": 4},
        {"0.288": 6},
        {"0.346": 6},
        {"0.415": 6},
        {"0.498": 6},
    ]
    chosen = runs.choose_values(row, None)
    assert chosen is not None and chosen.values == {"lr": "0.415"}
    read = row.read()
    (tuning,) = runs.compute_tunings(read, ACCURACY)
    assert (tuning.chosen, tuning.at_edge) == (0.415, False)
    # 0.4 is no better by more seeds than its neighbours: it has two, and no say.
    seeds = {x.values["lr"]: len(x.summaries) for x in read.trials}
    assert (seeds["0.1"], seeds["0.4"], seeds["0.415"]) == (2, 2, 6)


def test_two_optima_beyond_their_ranges_are_found_together(loader, tmp_path):
    """Beside the momentum of its own range, the best rate would be another one."""
    tune = "--tune=lr=0.1:0.4:log:3+2", "--tune=momentum=0.1:0.2:log:2+2"
    decided = read_config("--algos=sync_sgd", *tune, f"--out={tmp_path}", "--seeds=1")

    def score(lr, momentum):
        off = abs(np.log(lr * momentum / 0.32)) + abs(np.log(momentum / 0.4)) / 2
        return 0.9 - off / 20

    *_, lrs, momenta = followed(decided, loader, score)
    assert lrs == [("0.667", "0.4"), ("0.96", "0.4")]
    assert momenta == [("0.8", "0.333"), ("0.8", "0.48")]


def test_values_that_a_run_refuses_are_not_tried(loader, tmp_path):
    tune = "--tune=density=0.25:0.5:log:2+2"
    decided = read_config("--algos=topk_sgd", tune, f"--out={tmp_path}")
    # Neither 2 nor 1.2.
    assert followed(decided, loader, float) == [[("1",)], [("0.833",)]]


@pytest.mark.parametrize(
    ("tune", "num_trials"),
    [
        (["lr=0.01:1:log:50"], 2),  # its ends
        (["lr=0.01:1:log:50", "momentum=0:0.9:linear:9"], 4),  # its corners
        (["lr=0.1,0.2,0.3"], 3),
        (["period=1:8:linear:8"], 8),  # a whole number may have to divide something
        (["momentum=0.1,0.2", "period=1:8:linear:8"], 16),
    ],
)
def test_values_between_two_that_are_possible_are_not_tried_out(tune, num_trials):
    flags = [f"--tune={axis}" for axis in tune]
    decided = read_config("--algos=diloco", *flags)
    trials = list(decided.variants[0].decisive_trials())
    assert len(trials) == num_trials
    for axis in decided.tuned:
        values = {trial[axis.flag] for trial in trials}
        assert {axis.values[0], axis.values[-1]} <= values


@pytest.mark.parametrize(
    "words",
    [
        ["--sweep=period=1,4"],
        ["--tune=momentum=0.1,0.2", f"--tune={OUTER}", "--sweep=workers=1,2"],
    ],
)
def test_runs_are_counted_before_they_are_planned(loader, words):
    decided = read_config("--algos=sync_sgd,diloco", *words)
    num_runs = 0
    for point in runs.run_sets(decided, loader):
        num_runs += 5 + sum(len(trial.seeds) for trial in point.trials)
    assert config.count_runs(decided) == num_runs


def test_one_range_may_have_a_name_and_values_for_each_algorithm(loader):
    """Else block momentum of three algorithms would be three dimensions of trials."""
    words = "--algos=sync_sgd,bmuf,slowmo,powersgd", "--tune=lr=0.1:0.4:log:3"
    momentum_or_rank = "block_momentum|slow_momentum=0.5,0.9|rank=1,4"
    decided = read_config(*words, f"--tune={momentum_or_rank}")
    axes_by_algo = {x.algo: x.tuned[1:] for x in decided.variants}
    assert axes_by_algo == {
        "sync_sgd": [],
        "bmuf": [variants.Axis("block_momentum", ("0.5", "0.9"))],
        "slowmo": [variants.Axis("slow_momentum", ("0.5", "0.9"))],
        "powersgd": [variants.Axis("rank", ("1", "4"))],
    }
    for point in runs.run_sets(decided, loader):
        is_plain = point.variant.algo == "sync_sgd"
        assert len(point.trials) == point.variant.trials == (3 if is_plain else 6)
    other = read_config(*words, f"--tune={momentum_or_rank.replace('1,4', '1,8')}")
    assert config.identity(other) != config.identity(decided)
    # A preset's range serves some of its algorithms alone.
    two_algos = read_config("--algos=sync_sgd,bmuf", f"--tune={momentum_or_rank}")
    assert two_algos.variants[1].tuned == [axes_by_algo["bmuf"][0]]


def test_an_algorithm_without_any_tuned_flag_is_not_tried():
    decided = read_config("--algos=sync_sgd,diloco", "--tune", OUTER)
    assert decided.variants[0].tuned == []
    assert [*variants.combinations([])] == [] and decided.variants[0].trials == 0


def test_runs_that_tune_hold_data_out_and_have_seeds_of_their_own(loader):
    decided = read_config(
        *("--algos=bmuf,diloco", "--tune", "lr=0.1,0.2", "--tune", OUTER),
        *("--tune-seeds", "2", "--sweep", "period=2,4"),
    )
    folders = set()
    for point in runs.run_sets(decided, loader):
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
    decided = read_config(
        "--algos=a+b=bmuf,a-b=signum,A/B=bmuf", task="support.tiny_tasks:read"
    )
    folders = {p.folder for p in runs.run_sets(decided, loader)}
    assert len(folders) == 3
    assert all(not f.is_absolute() and ".." not in f.parts for f in folders)
    # scp and rsync would take what is before a colon for a host.
    assert ":" not in f"{decided.folder} {default_out('a:b', 'c:d')}"


def test_a_run_set_knows_which_of_its_runs_are_done(tmp_path):
    common = RunConfig(data_dir=Path("my data"))
    runs = RunSet(variants.Variant("a", common), 1, "", common, tmp_path, range(3))
    assert runs.missing() == [0, 1, 2] and runs.read().summaries == {}
    for seed in (0, 2):
        write_run(runs.seed_folder(seed), "bmuf", (0.1, 0.2, 0.3), seed=seed)
    (runs.folder / ".seed-1").mkdir()  # one that was stopped
    assert runs.missing() == [1]
    assert {k: x.seed for k, x in runs.read().summaries.items()} == {0: 0, 2: 2}
    assert [line["step"] for line in runs.read().lines[2]] == [10, 20, 30]
    words = ["--algo", "bmuf", "--task", "digits", "--data-dir", "my data"]
    assert shlex.split(runs.command) == ["python", "-m", "experiments.run", *words]


# A sweep.


@pytest.mark.parametrize(
    ("words", "runs"),
    [
        # As many samples, of a batch of 64 and 480 steps of the task.
        ("--sweep=workers=1,8", [(1, 64, 480, 0.05), (8, 64, 480, 0.05)]),
        # The rate follows a worker's batch.
        (
            "--sweep=workers=2,1,8 --worker-batch=8 --steps=200 --lr=0.1",
            [(2, 16, 200, 0.1), (1, 8, 400, 0.05), (8, 64, 50, 0.4)],
        ),
        # As whole steps allow.
        (
            "--sweep=batch-size=8,24,800 --steps=100",
            [(8, 8, 100, 0.05), (8, 24, 33, 0.05), (8, 800, 1, 0.05)],
        ),
        ("--sweep=steps=10,30", [(8, 64, 10, 0.05), (8, 64, 30, 0.05)]),
        ("--workers=4 --worker-batch=6", [(4, 24, 480, 0.05)]),
    ],
)
def test_a_sweep_keeps_the_samples_unless_it_is_of_steps(loader, words, runs):
    configs = planned(loader, "--algos=bmuf", *words.split()).values()
    sizes = [(s.workers, s.batch_size, s.steps, s.lr) for s in configs]
    assert sizes == [pytest.approx(run, rel=1e-5) for run in runs]  # six digits of lr


def test_an_algorithm_without_the_swept_flag_is_run_once(loader):
    configs = planned(loader, "--algos=sync_sgd,bmuf", "--sweep=period=1,4")
    assert [*configs] == [("sync_sgd", ""), ("bmuf", "period=1"), ("bmuf", "period=4")]
    assert {s.steps * s.batch_size for s in configs.values()} == {480 * 64}


def test_runs_are_those_of_their_command(loader):
    """The command in the report makes the point's runs, and so do jobs."""
    decided = read_config(
        *("--algos=bmuf --preset paper, NBM=bmuf --nesterov", "--model=mlp"),
        *("--sweep=workers=1,4", "--worker-batch=8", "--lr=0.3"),
        *("--tune=period=2,4", "--tune=momentum=0.1:0.9:linear:3", "--clip-norm=1e-3"),
    )
    for point in runs.run_sets(decided, loader):
        assert point.common.batch_size == 8 * point.common.workers
        for run_set in (point, *point.trials):
            assert parse(shlex.split(run_set.command)[3:]) == run_set.common
            assert f"workers={run_set.common.workers}" == point.point


@pytest.mark.parametrize(
    "sweep",
    [
        *("nesterov=true,false", "period=2,4", "block-lr=1,2", "block-momentum=none,0"),
        *("workers=2,4", "lr=1,2", "optimizer=sgd,adam", "devices=0,1", "model=mlp"),
        *("mesh=fsdp=2,tensor=2", "partition=iid,label", "init-from=a,b"),
    ],
)
def test_a_swept_value_is_what_the_words_of_a_run_say(sweep):
    study = read_config("--algos=bmuf", f"--sweep={sweep}")
    [variant] = study.variants
    for name, run in variant.configs().items():
        point = as_words(variant.points[name])
        words = "--algo=bmuf", "--task=digits", "--displacements"
        assert run == parse([*words, *point]), point


def test_trials_and_points_need_no_parsers_of_their_own(monkeypatch):
    """They are other fields of a config, whose words are read once for a variant."""
    make = argparse.ArgumentParser.__init__
    parsers = []

    def counted(self, *arguments, **options):
        parsers.append(self)
        make(self, *arguments, **options)

    monkeypatch.setattr(argparse.ArgumentParser, "__init__", counted)
    counts = []
    for values in ("0.1", "0.1,0.2,0.3"):
        parsers.clear()
        read_config("--algos=bmuf", f"--tune=lr={values}", f"--sweep=block-lr={values}")
        counts.append(len(parsers))
    assert counts[0] == counts[1] <= 4


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
    assert parse(config_words(config)) == config


# Data.


def test_data_is_read_once_for_runs_that_share_it(loader):
    _, data = loader.plan(parse(()))
    assert loader.plan(parse(["--lr=0.3", "--seed=7"]))[1] is data
    _, training_data = loader.plan(parse(["--validation=0.1"]))
    assert training_data.examples < data.examples


def test_a_study_knows_the_model_that_it_starts_from_by_its_content(tmp_path):
    model = tmp_path / "start.safetensors"
    checksums = []
    for text in ("one", "another"):
        model.write_text(text)
        loader = Loader()
        loader.plan(parse([f"--init-from={model}"]))
        checksums += loader.checksums()
    assert len({*checksums}) == 2


def test_data_that_follows_the_seed_is_that_of_each_seed(loader):
    """Else a study's run would not be what its command makes."""
    words = ["--task=imagenet_synthetic", "--image-size=32", "--examples=64"]
    images = []
    for seed in ("--seed=0", "--seed=1"):
        shared, fresh = (x.plan(parse([*words, seed]))[1] for x in (loader, Loader()))
        np.testing.assert_array_equal(shared.test["x"], fresh.test["x"])
        images.append(shared.test["x"])
    assert (images[0] != images[1]).any()


# What two studies of one folder must agree on.


RATES = ["lr", "0.0125", "0.025", "0.05", "0.1", "0.2", "0.4", "0.8", "1.6"]


@pytest.mark.parametrize(
    ("words", "stored_settings"),
    [
        pytest.param(
            "--seeds 3",
            {
                "entries": [
                    ["sync_sgd", "sync_sgd", []],
                    ["model_averaging", "model_averaging", []],
                    ["bmuf", "bmuf", []],
                ],
                "task": "digits",
                "words": [],
                "sweep": None,
                "tune": [RATES],
                "worker_batch": None,
                "scale_lr": "none",
                "tune_seeds": 1,
                "share": 0.1,
            },
            id="the default study, of 0.3 and 0.4",
        ),
        pytest.param(
            "--algos bmuf,diloco --tune lr=0.0125:1.6:log:8 --tune momentum=0.5,0.90 "
            "--tune-seeds 2 --devices-per-job 2",
            {
                "devices_per_job": 2,
                "entries": [["bmuf", "bmuf", []], ["diloco", "diloco", []]],
                "task": "digits",
                "words": [],
                "sweep": None,
                "tune": [RATES, ["momentum", "0.5", "0.90"]],
                "worker_batch": None,
                "scale_lr": "none",
                "tune_seeds": 2,
                "share": 0.1,
            },
            id="two tuned flags, of 0.3 and 0.4",
        ),
        pytest.param(
            "--algos 'sync_sgd, NBM=bmuf --nesterov, slow=diloco --period=64' --lr 0.1 "
            "--sweep workers=2,4 --worker-batch 8",
            {
                "entries": [
                    ["sync_sgd", "sync_sgd", []],
                    ["NBM", "bmuf", ["--nesterov"]],
                    ["slow", "diloco", ["--period=64"]],
                ],
                "task": "digits",
                "words": [["--lr", "0.1"]],
                "sweep": ["workers", "2", "4"],
                "tune": [],
                "worker_batch": 8,
                "scale_lr": "linear",
                "tune_seeds": None,
                "share": None,
            },
            id="labels and a sweep, of 0.4",
        ),
        pytest.param(
            "--algos sync_sgd,bmuf,slowmo,powersgd --tune lr=0.1:0.4:log:3+4 "
            "--tune 'block_momentum|slow_momentum=0.5,0.9|rank=1,4'",
            {
                "entries": [
                    ["sync_sgd", "sync_sgd", []],
                    ["bmuf", "bmuf", []],
                    ["slowmo", "slowmo", []],
                    ["powersgd", "powersgd", []],
                ],
                "task": "digits",
                "words": [],
                "sweep": None,
                "tune": [
                    ["lr", "0.1", "0.2", "0.4", "+4"],
                    ["block_momentum|slow_momentum", "0.5", "0.9", "rank", "1", "4"],
                ],
                "worker_batch": None,
                "scale_lr": "none",
                "tune_seeds": 1,
                "share": 0.1,
            },
            id="values beyond a range, and flags of some algorithms, of 0.4",
        ),
        pytest.param(
            "--preset paper --algos 'bmuf, diloco --period 8' --no-nesterov",
            {
                "entries": [
                    ["bmuf", "bmuf", []],
                    ["diloco --period 8", "diloco", ["--period", "8"]],
                ],
                "task": "digits",
                "words": [["--no-nesterov"], ["--preset", "paper"]],
                "sweep": None,
                "tune": [],
                "worker_batch": None,
                "scale_lr": "none",
                "tune_seeds": None,
                "share": None,
            },
            id="the values of papers, of 0.4",
        ),
    ],
)
def test_studies_of_earlier_releases_go_on(words, stored_settings):
    """As their study.json has it."""
    assert config.identity(read_config(*shlex.split(words))) == stored_settings


def test_the_order_of_shared_flags_is_no_other_study():
    decided = read_config("--lr", "0.1", "--workers", "4", "--tune-seeds", "2")
    reordered = read_config("--workers", "4", "--lr", "0.1")
    assert config.identity(decided) == config.identity(reordered)
    assert json.loads(json.dumps(config.identity(decided))) == config.identity(decided)


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
    assert config.identity(read_config(*words)) != config.identity(read_config())


def test_how_to_tune_is_another_study_where_anything_is_tuned():
    def identity(*argv):
        return config.identity(read_config(*argv))

    tune = "--tune=lr=0.1,0.2"
    assert identity(tune, "--tune-seeds=2") != identity(tune)
    untuned = "--lr=0.1"
    assert identity(untuned, "--tune-seeds=2") == identity(untuned)


@pytest.mark.parametrize(
    ("words", "tuned"),
    [
        ("", ["lr"]),
        ("--seeds=2 --jobs=1 --target=0.9", ["lr"]),
        ("--algos=bmuf", []),
        ("--task=mnist", []),
        ("--steps=9", []),
        ("--sweep=workers=1,2", []),
        ("--preset=local-steps", []),
        ("--algos=bmuf --tune=period=2,4", ["period"]),
    ],
)
def test_only_the_study_without_flags_tunes_the_rates_by_itself(words, tuned):
    """Else its headline would compare rates: bmuf's is eight times as high."""
    tuned_axes = read_config(*words.split()).tuned
    assert [axis.flag for axis in tuned_axes] == tuned
    if tuned == ["lr"]:
        for axis in tuned_axes:
            rates = [float(value) for value in axis.values]
            assert max(rates) / min(rates) >= 64
