"""Runs that draw from their seed while they train, and those that do not."""

import pytest

from experiments.cli import factories
from experiments.cli.factories import ALGORITHM
from experiments.cli.terminal import Quiet
from experiments.study.grid import Loader
from experiments.training.config import parse
from experiments.training.measurements.draws import draws_from_seed
from experiments.training.recording import record_config, train_and_record
from experiments.training.run import make_run, reseeded

FLAGS = ["--task", "tiny_tasks:drawing", "--workers", "4", "--steps", "20"]


def ready(words, seed):
    config = parse([*FLAGS, *words.split(), "--seed", str(seed)])
    return make_run(*Loader().plan(config))


def trained(run, out):
    record_config(run, [], out, [])
    _, summary = train_and_record(run, out, Quiet(), lambda: 0)
    return summary["params_sha256"]


def taking_seeds():
    """The algorithms that take a seed, which only some of their flags use."""
    for name in ALGORITHM.files:
        factory = factories.named(ALGORITHM, name)
        if factories.passed_arguments(ALGORITHM, factory, {"seed": 0}):
            yield name


@pytest.mark.parametrize(
    "words, expected",
    [
        ("bmuf", False),  # it takes no seed
        ("sync_sgd", False),
        ("sync_sgd --reduce bf16", False),
        ("sync_sgd --reduce int8", True),  # it rounds at random
        ("diloco --period 4", False),
        ("sparta", True),
    ],
)
def test_a_seed_is_in_the_program_where_it_is_drawn_from(words, expected):
    assert draws_from_seed(ready(f"--algo {words}", 0), 1) is expected


def test_a_task_that_takes_the_seed_may_have_other_data():
    assert draws_from_seed(ready("--task tiny_tasks:unlucky --algo bmuf", 0), 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*taking_seeds()])
def test_another_seed_without_another_program_is_that_seeds_own_run(name, tmp_path):
    period = "--period 4" if "period" in factories.defaults(ALGORITHM, name) else ""
    words = f"--algo {name} {period}"
    first = ready(words, 0)
    if draws_from_seed(first, 1):
        pytest.skip("each seed has a program of its own")
    trained(first, tmp_path / "first")
    again = trained(reseeded(first, 1), tmp_path / "again")
    assert again == trained(ready(words, 1), tmp_path / "own")
