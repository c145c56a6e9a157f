"""The tasks: one result for any number of workers, tables, memory, and their data."""

import functools
import itertools
from collections import Counter

import jax
import numpy as np
import optax
import pytest
import scipy.stats
from support import small_tasks
from support.small_tasks import on_real_data, task_folder

import syncalgos
from experiments.data import sampling, tokens
from experiments.tasks import TASKS, cifar10, classify, embeddings, imagenet_synthetic
from experiments.tasks.cifar10 import augment  # before a fixture replaces it
from experiments.tasks.task import held_out, losses
from experiments.training.config import parse
from experiments.training.prepare import prepare
from models import lstm
from syncalgos.reducers import _stacking

ROUNDING = 1e-9  # of float64: sums over the examples in another order
CLEARLY = 1e-6
STEPS = 3
BATCH = 8
LR = 0.05
WITH_IMAGES = [n for n in TASKS if "batch_norm" in small_tasks.parameters(n)]


@pytest.fixture
def float64(monkeypatch):
    """Pixels too, which the tasks make float32."""

    def normalise(x, mean, deviation):
        return (x.astype("float64") / 255 - np.array(mean)) / np.array(deviation)

    monkeypatch.setattr(classify, "normalise_images", normalise)
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
    monkeypatch.setattr(cifar10, "augment", lambda key, x: x)


def relative_errors(actual, expected):
    """The error of each leaf, relative to its largest entry."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    errors = [np.abs(a - e).max() / (np.abs([a, e]).max() or 1) for a, e in pairs]
    return np.array(errors)


def make_noisy_start(task):
    """Fresh params with noise, and buffers: a ResNet's blocks start as identities."""
    params, buffers = task.init(jax.random.key(0))
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda x: x + 0.1 * rng.normal(size=x.shape), params), buffers


def train(task, batches, workers=1):
    """Returns the center, the metrics and the engine after synchronous steps."""
    trainer = syncalgos.DataParallel(
        *(losses(task)[0], optax.sgd(LR, momentum=0.9), syncalgos.sync_sgd()),
        workers=workers,
        backend="vmap",
    )
    state, metrics = trainer.run(trainer.init(*make_noisy_start(task)), batches)
    center, metrics = jax.device_get((trainer.center(state), metrics))
    return center, metrics, trainer


# Frames of which some are padding, statistics that workers share, windows, tokens'
# bytes, and words before one.
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["spoken_digits", "cifar10", "shakespeare", "text", "embeddings"]
)
@pytest.mark.usefixtures("float64", "small_resnets", "unchanged_images")
def test_any_number_of_workers_gives_the_result_of_one(name):
    # With remat, so that collectives are computed again for the gradient.
    resnet_flags = (
        {"batch_norm": "global", "remat": True} if name in WITH_IMAGES else {}
    )
    task = small_tasks.make(name, **resnet_flags)
    batches = small_tasks.examples(name, STEPS, BATCH)
    expected = train(task, batches)[:2]
    actual = train(task, batches, workers=4)[:2]
    assert relative_errors(actual, expected).max() < ROUNDING
    assert (
        relative_errors(expected[0].params, make_noisy_start(task)[0]).min() > CLEARLY
    )


@pytest.mark.slow
@pytest.mark.usefixtures("float64", "small_resnets", "unchanged_images")
def test_batch_norm_of_each_worker_depends_on_their_number():
    batches = small_tasks.examples("cifar10", STEPS, BATCH)
    task = small_tasks.make("cifar10")
    of_one_worker, of_four_workers = (
        train(task, batches, workers)[0].params for workers in (1, 4)
    )
    assert relative_errors(of_four_workers, of_one_worker).min() > CLEARLY


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_stacked_blocks_of_a_resnet_and_what_it_sends_are_declared(name):
    """ResNet-20 has three stages of three blocks, of which two have equal shapes."""
    task = small_tasks.make(name, model="resnet20")
    global_task = small_tasks.make(name, model="resnet20", batch_norm="global")
    assert global_task.sends and not task.sends
    params, _ = jax.eval_shape(task.init, jax.random.key(0))
    counts = _stacking.counts(task.layered, params)
    for count, leaf in zip(counts, jax.tree.leaves(params), strict=True):
        assert count == (leaf.ndim in (2, 5) and leaf.shape[0] == 2)
    assert any(counts)


def shifts_in_numpy(x):
    """All that augmentation may make of an image: {(down, right, mirrored): image}."""
    padded = np.pad(x, [(4, 4), (4, 4), (0, 0)])
    height, width, _ = x.shape
    images = {}
    for down, right in itertools.product(range(9), repeat=2):
        cut = padded[down : down + height, right : right + width]
        images[down, right, False] = cut
        images[down, right, True] = cut[:, ::-1]
    return images


def test_augmented_images_are_shifted_and_mirrored_in_all_162_ways():
    """Each about as often, and with other draws for each image."""
    image = np.random.default_rng(0).normal(size=(6, 7, 3)).astype(np.float32)
    ways = {x.tobytes(): way for way, x in shifts_in_numpy(image).items()}
    assert len(ways) == 2 * 81
    draws = 162 * 40
    images, other = (
        np.asarray(augment(jax.random.key(seed), np.stack([image] * draws)))
        for seed in (0, 1)
    )
    assert (images != other).any((1, 2, 3)).mean() > 0.9
    assert (images.shape, images.dtype) == ((draws, *image.shape), np.float32)
    counts_by_way = Counter(ways[x.tobytes()] for x in images)
    assert len(counts_by_way) == 162
    assert scipy.stats.chisquare(list(counts_by_way.values())).pvalue > 1e-3


@pytest.mark.usefixtures("small_resnets")
def test_images_to_train_on_are_augmented_and_held_out_ones_are_not(monkeypatch):
    seen_shapes = []

    def noted(key, x):
        seen_shapes.append(x.shape)
        return x

    monkeypatch.setattr(cifar10, "augment", noted)
    task = small_tasks.make("cifar10")
    key = jax.random.key(0)
    start = jax.eval_shape(task.init, key)
    batch = small_tasks.examples("cifar10", 4)
    for train, shapes in [(False, []), (True, [(4, 32, 32, 3)])]:
        jax.eval_shape(functools.partial(task.apply, train=train), *start, batch, key)
        assert seen_shapes == shapes


def planned(task, words):
    """The run that the command line makes from flags, on real data."""
    flags = [
        "--task",
        task,
        "--data-dir",
        str(task_folder(task)),
        "--backend",
        "vmap",
    ]
    return prepare(parse([*flags, *words.split()]))


def run_plan(plan, steps=STEPS):
    """The plan's steps on its data: the center and the losses."""
    s = plan.config
    trainer = plan.trainer
    state = trainer.init(*plan.task.init(jax.random.key(s.seed)), s.seed)
    rows = sampling.rows(s.seed, 0, steps, s.batch_size, plan.data.examples)
    state, metrics = trainer.run(state, rows, trainer.place(plan.data.train))
    test_examples = {name: x[:50] for name, x in plan.data.test.items()}
    data, rows = held_out(test_examples, trainer.workers)
    evaluated = trainer.evaluate(state, rows, trainer.place(data))
    center = trainer.center(state).params
    return jax.device_get((center, (metrics["loss"], evaluated["loss"].mean())))


@functools.cache
def on_replicated_tables(words):
    """The end of a run that keeps its tables in the plainest way, and its start."""
    plan = planned("embeddings", words)
    center, losses = run_plan(plan)
    start, _ = plan.task.init(jax.random.key(0))
    assert center["words"].shape == (embeddings.WORDS, 4)
    assert relative_errors(center, jax.device_get(start)).min() > CLEARLY
    return center, losses


# Over 4 workers the 12,631 words leave a rest. A full softmax reads tables whole.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("table_placement", "words"),
    [
        ("--tables sharded", "--negatives 5 --accumulate 2"),
        ("--tables shared", "--negatives 0"),
        ("--reduce row_sparse", "--negatives 5 --accumulate 2"),
    ],
)
@pytest.mark.usefixtures("float64")
def test_tables_kept_in_any_way_give_the_center_of_replicated_ones(
    table_placement, words
):
    """Under synchronous SGD, of one number of workers: each draws its own negatives."""
    words = f"{words} --algo sync_sgd --order 3 --width 4 --batch-size 24 --workers 4"
    params, loss = run_plan(
        planned("embeddings", f"{words} --momentum 0.9 {table_placement}")
    )
    for name in embeddings.TABLES:
        assert not params[name][embeddings.WORDS :].any()  # padding
        params[name] = params[name][: embeddings.WORDS]
    expected = on_replicated_tables(f"{words} --momentum 0.9")
    assert relative_errors((params, loss), expected).max() < ROUNDING


@pytest.mark.slow
def test_row_sparse_sends_ten_times_fewer_bytes_by_default():
    words = "--algo sync_sgd --accumulate 2 --reduce row_sparse"
    task = (plan := planned("embeddings", words)).task
    trainer = plan.trainer
    state = trainer.init(*task.init(jax.random.key(0)))
    sparse = trainer.communication(state, 1).bytes_per_worker
    # 8 workers of 32 examples: 4 words before each; and beside its own, 64 negatives
    # of each microbatch. A row goes to 7 peers with its number: 64 floats, and in
    # outputs a bias.
    hidden = 2 * 7 / 8 * 4 * (4 * 64 * 64 + 64)
    outputs = 32 + 64 * 2
    rows = 7 * (32 * 4 * (4 + 4 * 64) + outputs * (4 + 4 * 64 + 4))
    assert sparse == hidden + rows
    assert 10 * sparse < hidden + 2 * 7 / 8 * 4 * 12_631 * (64 + 64 + 1)


@pytest.mark.slow
def test_shared_tables_step_at_once_while_the_rest_waits_for_a_sync():
    words = "--algo bmuf --period 100 --workers 4 --tables shared --order 3"
    plan = planned("embeddings", f"{words} --width 4 --negatives 5 --batch-size 16")
    params, _ = run_plan(plan)
    start = jax.device_get(plan.task.init(jax.random.key(0))[0])
    assert relative_errors(params["hidden"], start["hidden"]).max() == 0
    for name in embeddings.TABLES:
        assert np.abs(params[name] - start[name]).max() > CLEARLY


def products(task, batch):
    """The matrix products of a gradient, with those that are computed again."""

    def loss(params, buffers):
        values, _ = task.apply(params, buffers, batch, jax.random.key(0), train=True)
        return values["loss"].mean()

    start = jax.eval_shape(task.init, jax.random.key(0))
    return str(jax.make_jaxpr(jax.grad(loss))(*start)).count("dot_general")


WITH_REMAT = [n for n in TASKS if "remat" in small_tasks.parameters(n)]


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_REMAT)
@pytest.mark.usefixtures("small_resnets")
def test_remat_is_what_the_model_gets(name):
    model = {"model": "resnet20"} if name in WITH_IMAGES else {}
    stored_task, remat_task = (
        small_tasks.make(name, **model, remat=x) for x in (False, True)
    )
    batch = small_tasks.examples(name, BATCH)
    assert products(remat_task, batch) > products(stored_task, batch)


@pytest.mark.slow
@pytest.mark.usefixtures("float64", "unchanged_images")
def test_remat_of_a_resnet_keeps_the_gradients_and_holds_less(monkeypatch):
    long = {"stem": (3, 8, 1), "stages": ((6, 8, 1),)}
    spec = classify.RESNETS["resnet20"]._replace(**long)
    monkeypatch.setitem(classify.RESNETS, "resnet20", spec)
    batches = small_tasks.examples("cifar10", 1, BATCH)
    tasks = [small_tasks.make("cifar10", remat=x) for x in (False, True)]
    (*plain, keeps_all), (*again, keeps_less) = (
        train(task, batches, workers=2) for task in tasks
    )
    assert relative_errors(again, plain).max() < ROUNDING
    remat_bytes, stored_bytes = (
        trainer.temp_bytes or 0 for trainer in (keeps_less, keeps_all)
    )
    assert 0 < remat_bytes < 0.9 * stored_bytes


@pytest.mark.slow
@pytest.mark.usefixtures("float64")
def test_frames_of_padding_do_not_count():
    task = small_tasks.make("spoken_digits")
    params, _ = make_noisy_start(task)
    recording = small_tasks.examples("spoken_digits", 1)
    recording["length"][0] = length = 2  # of more frames
    assert length < recording["x"].shape[1]
    logits = lstm.apply(params, recording["x"])[0, :length].mean(0)
    values, _ = task.apply(params, (), recording, None, train=False)
    digit = recording["y"][0]
    loss = np.log(np.exp(logits).sum()) - logits[digit]
    np.testing.assert_allclose(values["loss"], [loss], rtol=ROUNDING)
    assert float(values["accuracy"][0]) == float(logits.argmax() == digit)


@pytest.mark.slow
def test_negatives_follow_zipfs_law():
    law = np.exp(embeddings.LOG_Q)
    assert law.sum() == pytest.approx(1, abs=1e-12)
    ranks = np.array([1, 2, 100, 12_631])
    expected = np.log((ranks + 1) / ranks) / np.log(12_632)
    np.testing.assert_allclose(law[ranks - 1], expected, rtol=1e-9)
    assert law[9] / law[99] == pytest.approx(10, rel=0.05)  # 1 / rank

    drawn = np.asarray(embeddings._draw(jax.random.key(0), 4_000_000))
    assert drawn.min() == 0 and drawn.max() == 12_630  # expected 34 times
    edges = np.unique([*range(20), *np.geomspace(20, 12_631, 60).astype(int)])
    counts = np.histogram(drawn, edges)[0]
    shares = np.add.reduceat(law, edges[:-1])
    assert scipy.stats.chisquare(counts, len(drawn) * shares).pvalue > 1e-3


def pictures(seed=0, **kwargs):
    """The training pictures and the held-out ones."""
    sizes = {"model": "resnet20", "image_size": 32, "classes": 3, "examples": 40}
    return imagenet_synthetic.imagenet_synthetic(**sizes, seed=seed, **kwargs).load()


def test_a_picture_is_known_by_its_seed_and_number():
    data, again, other = (pictures(seed).train for seed in (3, 3, 4))
    assert len(data) == 40
    for number in (39, 0, 7):
        picture = data[number]
        same_picture = again[number]
        other_picture = other[number]
        np.testing.assert_array_equal(picture["x"], same_picture["x"])
        assert picture["y"] == same_picture["y"] < 3
        assert (picture["x"] != other_picture["x"]).mean() > 0.9


def test_all_pictures_differ_the_held_out_ones_from_those_to_train_on():
    data = pictures()
    train = [data.train[number]["x"] for number in range(len(data.train))]
    held_out = list(data.test["x"])
    assert len({x.tobytes() for x in [*train, *held_out]}) == 40 + len(held_out) == 72


def test_pictures_of_one_class_share_a_pattern():
    """The mean over noise is the pattern and half of 127: apart by class alone."""
    data = pictures()
    labels = np.array([int(data.train[i]["y"]) for i in range(40)])
    images = np.array([data.train[i]["x"] for i in range(40)], float)
    assert set(labels) == {0, 1, 2}
    means = np.array([images[labels == label].mean(0) for label in range(3)])
    spread = np.abs(means[:, None] - means).mean((2, 3, 4))
    assert spread[~np.eye(3, dtype=bool)].min() > 30
    tiles = means.reshape(3, 8, 4, 8, 4, 3)  # of 4×4 pixels
    assert tiles.std((2, 4)).max() < 0.5 * 37 < tiles.mean((2, 4)).std()
    nearest = np.abs(data.test["x"][:, None] - means).mean((2, 3, 4)).argmin(1)
    np.testing.assert_array_equal(nearest, data.test["y"])  # held out: alike


def held_out_text(split):
    codes, _ = split(tokens.shakespeare(task_folder("shakespeare")))
    return tokens.split(codes)[1]


@pytest.mark.parametrize("order", [2, 5])
def test_every_ngram_of_the_held_out_text_counts_once(order):
    codes = held_out_text(tokens.words)
    ngrams = on_real_data("embeddings", order=order).load().test["ngram"]
    expected = [codes[i : i + order] for i in range(len(codes) - order + 1)]
    np.testing.assert_array_equal(ngrams, expected)


def test_an_order_beyond_the_held_out_text_is_refused_before_ngrams_are_cut(
    monkeypatch,
):
    """The n-grams of the longer training text would take gigabytes."""
    words = len(held_out_text(tokens.words))
    task = on_real_data("embeddings", order=words + 1)

    def cut(view):
        raise AssertionError(f"n-grams are cut: {view.shape}")

    monkeypatch.setattr(np, "ascontiguousarray", cut)
    message = f"--order {words + 1} is longer than the held-out text .{words} words"
    with pytest.raises(ValueError, match=message):
        task.load()


@pytest.mark.parametrize("context", [7, 128])
def test_every_held_out_character_is_predicted_once(context):
    """From the second, up to the last window that is whole."""
    codes = held_out_text(tokens.characters)
    windows = on_real_data("shakespeare", context=context).load().test["window"]
    predicted = windows[:, 1:].ravel()
    np.testing.assert_array_equal(predicted, codes[1 : 1 + len(predicted)])
    assert 0 <= len(codes) - 1 - len(predicted) < context
    np.testing.assert_array_equal(windows[1:, 0], windows[:-1, -1])


def test_blank_data_has_the_form_of_the_real():
    task = on_real_data("shakespeare", context=7)
    assert task.blank is not None
    blank = task.blank()
    real = task.load()
    for mine, other in ((blank.train, real.train), (blank.test, real.test)):
        assert mine["window"].shape == other["window"].shape
        assert mine["window"].dtype == other["window"].dtype
    assert blank._replace(train={}, test={}) == real._replace(train={}, test={})


@pytest.mark.parametrize(("context", "times"), [(64, 8), (20, 5), (5, 5)])
def test_a_character_is_in_at_most_eight_training_windows(context, times):
    """Windows' starts divide the context."""
    codes, _ = tokens.split(
        tokens.characters(tokens.shakespeare(task_folder("shakespeare")))[0]
    )
    windows = on_real_data("shakespeare", context=context).load().train["window"]
    stride = context // times
    starts = range(0, len(codes) - context, stride)
    assert len(windows) == len(starts)
    for number in (0, 1, 777, len(starts) - 1):
        start = starts[number]
        expected = codes[start : start + context + 1]
        np.testing.assert_array_equal(windows[number], expected)
    predicted = Counter()
    for start in starts[:50]:
        predicted.update(range(start, start + context))
    assert max(predicted.values()) == times <= 8
