"""The tasks: one result for any number of workers, tables, memory, and their data."""

import math

import jax
import numpy as np
import optax
import pytest
import scipy.stats
import small_tasks
from small_tasks import SMALL, folder_of, on_real_data

import syncalgos
from experiments import flags, stream
from experiments.data import text
from experiments.plan import prepare
from experiments.tasks import TASKS, cifar10, classify, embeddings, imagenet_synthetic
from experiments.tasks.cifar10 import augmented  # before a fixture replaces it
from experiments.tasks.spoken_digits import mean_output
from experiments.tasks.task import held_out, losses
from models import lstm
from syncalgos.layout import BACKENDS

ROUNDING = 1e-9  # of float64: sums over the examples in another order
PIXELS = 1e-5  # they become float32, which compiles to other roundings
CLEARLY = 1e-3
STEPS, BATCH, LR = 3, 8, 0.01
WITH_BATCH_NORM = [n for n in TASKS if "batch_norm" in small_tasks.parameters(n)]


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def small_resnets(monkeypatch):
    """One stage of three blocks each: whole ones take ten seconds to compile."""
    for name, spec in classify.RESNETS.items():
        small = spec._replace(stem=(3, 4, 1), stages=((3, 4, 2),))
        monkeypatch.setitem(classify.RESNETS, name, small)


@pytest.fixture
def unchanged_images(monkeypatch):
    """Without the draws, which differ between workers."""
    monkeypatch.setattr(cifar10, "augmented", lambda key, x: x)


def relative_errors(actual, expected):
    """Of each leaf, relative to its largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    return [np.abs(a - e).max() / (np.abs([a, e]).max() or 1) for a, e in pairs]


def train(task, batches, workers=1, backend="vmap", **options):
    """Returns the center, the metrics and the engine after synchronous steps."""
    trainer = syncalgos.DataParallel(
        *(losses(task)[0], optax.sgd(LR, momentum=0.9), syncalgos.sync_sgd(), workers),
        **{"backend": backend, **options},
    )
    state = trainer.init(*task.init(jax.random.key(0)))
    state, metrics = trainer.run(state, batches)
    return trainer.center(state), metrics, trainer


@pytest.mark.parametrize("name", TASKS)
def test_small_examples_have_the_form_of_the_real_ones(name):
    data = on_real_data(name).load()
    first = {leaf: x[:1] for leaf, x in data.train.items()} if isinstance(
        data.train, dict
    ) else {leaf: np.asarray(x)[None] for leaf, x in data.train[0].items()}
    for part in (first, data.test):
        drawn = small_tasks.examples(name, 1)
        assert part.keys() == drawn.keys()
        for leaf, x in part.items():
            assert (x.dtype, x.shape[1:]) == (drawn[leaf].dtype, drawn[leaf].shape[1:])
            if below := SMALL[name].form[leaf].below:
                assert 0 <= x.min() and x.max() <= below
    assert data.examples > 100


def global_batch(name, model=None):
    """Flags that make the result one of the global batch alone."""
    given = {} if model is None else {"model": model}
    parameters = small_tasks.parameters(name)
    model = model or SMALL[name].flags.get("model", parameters["model"].default)
    return {**given, **({"batch_norm": "global"} if model in classify.RESNETS else {})}


def layouts():
    """Names of tasks with workers and backends; what others cover is marked slow."""
    for name in TASKS:
        image = name in WITH_BATCH_NORM
        for backend, workers in [("vmap", 2), ("vmap", 4), ("vmap", 8), ("pmap", 4)]:
            few = (backend, workers) == ("vmap", 4) or name == "digits"
            marks = pytest.mark.slow if not few and image else ()
            yield pytest.param(name, workers, backend, marks=marks)


@pytest.mark.parametrize(("name", "workers", "backend"), list(layouts()))
@pytest.mark.usefixtures("float64", "small_resnets", "unchanged_images")
def test_any_number_of_workers_gives_the_result_of_one(name, workers, backend):
    task = small_tasks.make(name, **global_batch(name))
    batches = small_tasks.examples(name, STEPS, BATCH)
    devices = [0, 1] if backend == "pmap" else None
    start = task.init(jax.random.key(0))
    *expected, _ = train(task, batches)
    *actual, trainer = train(task, batches, workers, backend, devices=devices)
    assert trainer.layout.shape == ((2, 2) if backend == "pmap" else (1, workers))
    within = PIXELS if name in WITH_BATCH_NORM else ROUNDING
    assert max(relative_errors(actual, expected)) < within
    assert min(relative_errors(expected[0].params, start[0])) > 100 * within
