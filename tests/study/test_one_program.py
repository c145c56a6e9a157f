"""Numbers are data: a variant's rates and seeds share its programs."""

import json
import sys

import numpy as np
import pytest
from support.commands import COMPARE, execute
from support.tiers import tiers

import syncalgos
from experiments.command.errors import BadRequest
from experiments.command.factories import ALGORITHM, describe_factory
from experiments.study.making import FinishedRun, Maker
from experiments.training.config import parse
from experiments.training.defaults import takes
from experiments.training.plan import make_plan
from syncalgos.writing import factory

WORDS = (
    "--task support.tiny_tasks:rolling --workers 4 --displacements "
    "--eval-every 4 --steps 8"
)
FAST = "--dispatch-steps 4"


class Runs:
    """Runs one after the other, as a study makes them."""

    def __init__(self, folder):
        self.maker = Maker()
        self.folder = folder

    def make(self, words):
        config = parse([*WORDS.split(), *FAST.split(), *words.split()])
        out = self.folder / words.replace(" ", "") / f"seed-{config.seed}"
        answer = self.maker.make(0, config, out, lambda news: None, lambda: 0)
        assert isinstance(answer, FinishedRun), answer
        return json.loads((out / "summary.json").read_text())

    @property
    def programs(self):
        """The programs of the last run."""
        cell = self.maker.cell
        assert cell is not None and cell.programs is not None
        return cell.programs

    @property
    def ends(self):
        """The ends of the last run's rounds."""
        return self._measuring[0]

    @property
    def trainer(self):
        """The last engine, which records displacements if any does."""
        return self._measuring[1]

    @property
    def _measuring(self):
        # Nothing is measured where the data decide when to sync.
        return self.programs.measuring or (None, self.programs.trainer)

    @property
    def compiled(self):
        """The last engine, and the seconds that it has compiled."""
        return id(self.trainer), self.trainer.compile_seconds


# The default algorithm, and where the rate decides when workers sync. The others are
# nearly all alike.
KINDS = "bmuf", "qsr"


@pytest.mark.parametrize("name", tiers(ALGORITHM.files, slow=KINDS))
def test_another_rate_seed_and_number_compile_nothing(name, tmp_path):
    runs = Runs(tmp_path)
    words = f"--algo {name}"
    words += (
        " --period 4" if "period" in describe_factory(ALGORITHM, name).flags else ""
    )
    heavy = name != "zero_one_adam"  # which takes plain SGD alone
    runs.make(f"{words} --lr 0.05" + " --momentum 0.9" * heavy)
    first_programs = runs.programs
    ends = runs.ends
    old_compiled = runs.compiled
    changed = f"{words} --lr 0.03" + " --momentum 0.8" * heavy
    if "seed" in first_programs.varied.fields or not takes(
        first_programs.settings, "seed"
    ):
        changed += " --seed 7"
    for k in first_programs.varied.arguments:
        changed += (
            f" --{k.replace('_', '-')} {0.9 * first_programs.settings.arguments[k]:g}"
        )
    summary = runs.make(changed)
    assert runs.programs is first_programs
    # Where a number decides when workers sync, other rounds are measured, by a program
    # of their own.
    if np.array_equal(ends, runs.ends):
        assert runs.compiled == old_compiled
    alone = Runs(tmp_path / "alone").make(changed)
    for key in ("params_sha256", "test_loss", "bytes_per_worker", "effective_lr"):
        assert summary[key] == alone[key], key


@pytest.mark.slow
def test_what_is_structure_has_a_program_of_its_own(tmp_path):
    runs = Runs(tmp_path)
    trainers = []
    other_flags = "momentum 0.5", "period 3", "block-momentum 0.5", "weight-decay 0.1"
    for flag in ("period 2", *other_flags):
        runs.make(f"--algo bmuf --period 2 --weight-decay 0 --{flag}")
        trainers.append(runs.trainer)
    plain, momentum, *structure_ids = map(id, trainers)
    assert plain == momentum and len({plain, *structure_ids}) == 4


@pytest.mark.slow
def test_trials_share_the_programs_of_the_runs_to_report(tmp_path):
    runs = Runs(tmp_path)
    runs.make("--algo bmuf --period 2 --validation 0.2 --batch-size 8")
    first_programs = runs.programs
    old_programs = {*runs.trainer._compiled.programs}
    runs.make("--algo bmuf --period 2 --batch-size 8")
    assert runs.programs is first_programs
    assert {*runs.trainer._compiled.programs} == old_programs


@pytest.mark.slow
def test_the_default_study_compiles_ten_programs_for_each_algorithm(tmp_path):
    cache = tmp_path / "cache"
    variables = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    command = "--steps 100 --seeds 2 --tune lr=0.1,0.2"
    execute(command, tmp_path / "out", COMPARE, **variables).with_code(0)
    programs = sorted(path.name.split("-")[0] for path in cache.glob("*-cache"))
    assert 20 < len(programs) <= 30, programs


ALIKE = """
import syncalgos
from syncalgos.writing import factory

def asking(weight: float = 0.5):
    '''BMUF that asks for the value of its momentum.'''
    if weight > 0.7:
        raise ValueError("too much")
    return syncalgos.bmuf(2, block_momentum=weight)

def undeclared(weight: float = 0.5):
    '''BMUF.'''
    return syncalgos.bmuf(2, block_momentum=weight)

@factory(static=[])
def declared(weight: float = 0.5):
    '''BMUF whose momentum may be data.'''
    return syncalgos.bmuf(2, block_momentum=weight)

@factory(static=[])
def wrong(weight: float = 0.5):
    '''BMUF that asks for the value of its momentum, and does not say so.'''
    return asking(weight)

def scheduled(learning_rate, weight: float = 0.5, seed: int = 0):
    '''BMUF that asks for the rate and the seed.'''
    rate = learning_rate(0) if callable(learning_rate) else learning_rate
    return syncalgos.bmuf(2, block_momentum=weight if rate > seed else 0.0)
"""


@pytest.fixture
def alike(tmp_path, monkeypatch):
    """A module of a user's algorithms."""
    (tmp_path / "alike.py").write_text(ALIKE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("alike", None)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["asking", "undeclared", "declared"])
def test_a_users_algorithm_is_compiled_for_each_number_unless_it_declares_them(
    name, tmp_path, alike
):
    runs = Runs(tmp_path / "runs")
    runs.make(f"--algo alike:{name} --weight 0.5")
    old_compiled = runs.compiled
    runs.make(f"--algo alike:{name} --weight 0.6")
    assert (runs.compiled[0] == old_compiled[0]) == (name == "declared")


def test_a_users_algorithm_may_ask_for_the_rate_and_the_seed(alike):
    plan = make_plan(parse(["--algo", "alike:scheduled"]))
    assert not {"lr", "seed"} & plan.numbers.keys()


def test_a_number_that_is_wrongly_declared_as_data_is_refused_in_a_line(alike):
    with pytest.raises(BadRequest) as refused:
        make_plan(parse(["--algo", "alike:wrong"]))
    line = str(refused.value)
    for words in ("alike:wrong", "in asking", "weight", "static=["):
        assert words in line
    assert "\n" not in line


def test_a_static_argument_is_one_of_the_function():
    with pytest.raises(ValueError, match="static argument of make 'weigth'; did you"):

        @factory(static=["weigth"])
        def make(weight: float = 0.5):
            return syncalgos.bmuf(2, block_momentum=weight)
