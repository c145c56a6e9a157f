"""Runs with a partition, and runs that a study makes in a row."""

import functools
import json
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from experiments.command.terminal import ProgressDisplay
from experiments.one_run import Folder
from experiments.tasks.task import Data, Task
from experiments.training.config import parse
from experiments.training.defaults import takes
from experiments.training.prepare import make_run, prepare, prepare_plan
from experiments.training.summary import summarize

EXAMPLES = 40
HELD_OUT = 8
FIRST_TEST_NUMBER = 1000
WORKERS = 2
WORKER_BATCH = 5
STEPS = 16  # OWN examples of each worker a step
DRAWN = WORKER_BATCH * STEPS  # of each worker


def counting() -> Task:
    """Params that count: SGD at the rate OWN adds 1 at each example of a batch.

    Example i has the number i, one of four labels and one of four speakers; those of
    the test data have numbers from FROM on. `test_number` is their mean.
    """
    numbers = np.arange(EXAMPLES, dtype=np.int32)

    def apply(params, buffers, batch, key, train):
        loss = -params.at[batch["number"]].get(mode="fill", fill_value=0)
        return {"loss": loss, "number": batch["number"].astype(jnp.float32)}, buffers

    return Task(
        init=lambda key: (jnp.zeros(EXAMPLES), ()),
        apply=apply,
        load=lambda: Data(
            {"number": numbers},
            {
                "number": np.arange(
                    FIRST_TEST_NUMBER, FIRST_TEST_NUMBER + HELD_OUT, dtype=np.int32
                )
            },
            {"label": numbers % 4, "speaker": numbers // 10},
        ),
        batch_size=WORKERS * WORKER_BATCH,
        steps=STEPS,
        lr={"": float(WORKER_BATCH)},
        dispatch_steps=STEPS,
    )


COUNTING = [
    *("--task", f"{__name__}:counting", "--workers", str(WORKERS)),
    *("--backend", "vmap", "--eval-every", str(STEPS)),
]
WITHOUT_SYNC = ["--algo", "model_averaging", "--period", "1000"]  # they never agree


def again(run, *words):
    """A run of other words behind a run, with its programs."""
    shared_run = make_run(
        *prepare_plan(parse(words), run.data, programs=run.plan.programs)
    )
    assert shared_run.trainer is run.trainer
    return shared_run


def prepare_run(*argv):
    return prepare(parse([*argv]))


def finished(job):
    """The outcome of a run, its summary, and what its files say."""
    with tempfile.TemporaryDirectory() as folder:
        run_folder = Folder(job, out := Path(folder) / "out", 0.0)
        run_folder.record([])
        outcome = run_folder.train(ProgressDisplay(), lambda: 0)
        config = json.loads((out / "config.json").read_text())
        text = (out / "metrics.jsonl").read_text()
    assert outcome.diverged_at is None
    summary = summarize(job, outcome).to_json()
    return outcome, summary, config, [json.loads(line) for line in text.splitlines()]


@functools.cache
def counted(*argv):
    """The plan, how often each worker took each example, (workers, examples), lines."""
    plan = prepare_run(*COUNTING, *WITHOUT_SYNC, *argv)
    outcome, _, _, lines = finished(plan)
    counts = np.asarray(outcome.state.replica.params).reshape(WORKERS, EXAMPLES)
    return plan, counts, lines


# Who gets what.


DEALT = "--partition", "dirichlet:0.5", "--validation", "0.1"


@pytest.mark.slow
def test_a_worker_trains_on_examples_of_its_own_shard_alone():
    """And on each as often as on the others, to within one round of the shard."""
    plan, counts, _ = counted(*DEALT)
    numbers = plan.data.train["number"]
    assert len(plan.shards) == WORKERS
    every = np.sort(np.concatenate(plan.shards))
    np.testing.assert_array_equal(every, np.arange(len(numbers)))
    for worker_counts, shard in zip(counts, plan.shards, strict=True):
        assert worker_counts.sum() == DRAWN
        inside = np.isin(np.arange(EXAMPLES), numbers[shard])
        assert (worker_counts[~inside] == 0).all()
        rounds = DRAWN // len(shard)
        assert set(worker_counts[inside]) <= {rounds, rounds + 1}


@pytest.mark.slow
def test_a_partition_follows_the_runs_seed_and_validation_data_does_not():
    """Runs of several seeds choose by the same examples."""
    words = (*COUNTING, *WITHOUT_SYNC, "--partition", "label", "--validation", "0.1")
    first_run, same_run, other_run = (
        prepare_run(*words, "--seed", x) for x in ("1", "1", "2")
    )
    dealt_anew = again(first_run, *words, "--seed", "2")
    assert (first_run.config.seed, dealt_anew.config.seed) == (1, 2)
    for run, same_seed_run in ((first_run, same_run), (dealt_anew, other_run)):
        for mine, its in zip(run.shards, same_seed_run.shards, strict=True):
            np.testing.assert_array_equal(mine, its)
    pairs = zip(first_run.shards, other_run.shards, strict=True)
    assert any(set(a) != set(b) for a, b in pairs)
    validation_numbers = [run.data.test["number"] for run in (first_run, other_run)]
    np.testing.assert_array_equal(*validation_numbers)


@pytest.mark.slow
def test_without_a_partition_workers_share_one_stream_of_all_examples():
    plan, counts, _ = counted()
    assert plan.shards is None
    np.testing.assert_array_equal(counts.sum(0), WORKERS * DRAWN / EXAMPLES)
    assert (counts > 0).all(1).sum() == 0 and (counts[0] * counts[1]).any()


# Validation data.


@pytest.mark.slow
def test_the_validation_part_is_trained_on_by_nobody_and_is_the_test():
    plan, counts, lines = counted(*DEALT)
    held_out_numbers = np.flatnonzero(counts.sum(0) == 0)
    assert len(held_out_numbers) == EXAMPLES // 10
    assert sorted(held_out_numbers % 4) == [0, 1, 2, 3]  # one of each label
    np.testing.assert_array_equal(np.sort(plan.data.test["number"]), held_out_numbers)
    assert lines[-1]["test_number"] == pytest.approx(held_out_numbers.mean())


@pytest.mark.slow
def test_without_validation_the_test_is_that_of_the_task():
    plan, counts, lines = counted()
    assert plan.data.examples == EXAMPLES and (counts.sum(0) > 0).all()
    assert lines[-1]["test_number"] == FIRST_TEST_NUMBER + (HELD_OUT - 1) / 2


# Seed after seed.


def without(line, *names):
    return {name: x for name, x in line.items() if name not in names}


@pytest.mark.slow
def test_another_seed_of_a_compiled_run_leaves_the_files_of_a_fresh_run():
    words = [*COUNTING, "--algo", "bmuf", "--partition", "dirichlet:0.5"]
    first_run = prepare_run(*words)
    _, first_summary, *_ = finished(first_run)
    seed = (*words, "--seed", "3")
    _, summary, config, lines = finished(again(first_run, *seed))
    _, expected, expected_config, expected_lines = finished(prepare_run(*seed))
    assert summary["params_sha256"] != first_summary["params_sha256"]
    assert summary["seed"] == config["seed"] == config["settings"]["seed"] == 3
    of_the_time = ("started", "sha256")  # the second is a checksum of the file
    assert without(config, *of_the_time) == without(expected_config, *of_the_time)
    timed = ("seconds", "steps_per_second")
    assert without(summary, *timed) == without(expected, *timed)
    for line, expected_line in zip(lines, expected_lines, strict=True):
        assert without(line, "seconds") == without(expected_line, "seconds")


@pytest.mark.parametrize(
    ("argv", "seeded"),
    [
        (["--algo", "bmuf"], False),
        (["--algo", "noloco"], True),  # who meets whom
        (["--task", "imagenet_synthetic", "--batch-size", "8"], True),
    ],
)
def test_what_draws_from_the_seed_while_it_trains_is_another_program(argv, seeded):
    assert takes(parse(["--workers", "2", *argv]), "seed") == seeded


# Displacements.


@pytest.mark.slow
def test_displacements_are_those_of_what_the_workers_saw():
    """Two workers that count go from 0 to their counts."""
    _, counts, _ = counted()
    words = ["--algo", "model_averaging", "--period", str(STEPS), "--displacements"]
    _, _, _, (line,) = finished(prepare_run(*COUNTING, *words))
    norm = np.linalg.norm(counts.mean(0))
    assert line["pseudo_gradient"] == pytest.approx(norm, rel=1e-5)
    a, b = counts
    cosine = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
    assert line["displacement_cosine"] == pytest.approx(cosine, abs=1e-5)
    assert line["drift"] == pytest.approx(np.linalg.norm(a - b) / 2, rel=1e-5)
