"""Validation data: a part of the training data that nothing trained on shows."""

import functools

import numpy as np
import pytest
from support import small_tasks
from support.small_tasks import on_real_data
from support.tiers import tiers

from experiments.data import feeding, formats, sampling, tokens
from experiments.data.feeding import check_data
from experiments.tasks import TASKS
from experiments.tasks.task import Data

N = 1000
LABELS = np.sort(np.random.default_rng(0).integers(0, 7, N))  # as some data sets come
UNSEEN = {"number": np.array([-1])}  # test data


def numbered(**fields):
    """Data whose examples are their own numbers."""
    return Data({"number": np.arange(N)}, UNSEEN, **fields)


class Numbers:
    """A source that notes which examples were read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return N

    def __getitem__(self, number):
        self.read.append(number)
        return {"number": np.asarray(number)}


@pytest.fixture
def small_cifar(monkeypatch):
    """Random pictures: the real ones take a download."""
    pair = [small_tasks.examples("cifar10", n, seed=n) for n in (300, 40)]
    monkeypatch.setattr(formats, "cifar_images", lambda folder: pair)


@functools.cache
def load(name):
    on_files = small_tasks.make if name == "cifar10" else on_real_data
    return on_files(name).load()


def assert_form(part, form):
    """Asserts that examples are as those that other tests draw."""
    assert part.keys() == form.keys()
    for leaf, (dtype, shape, below) in form.items():
        x = part[leaf]
        assert (x.dtype, x.shape) == (dtype, (len(x), *shape))
        assert not below or (x.min() >= 0 and x.max() <= below)


@pytest.mark.parametrize("name", tiers(TASKS, [x for x in TASKS if x != "mnist1d"]))
@pytest.mark.usefixtures("small_cifar")
def test_every_task_can_be_split_and_partitioned_by_its_groups(name):
    data = load(name)
    check_data(data)
    for part in (feeding.gather(data.train, np.arange(100)), data.test):
        assert_form(part, small_tasks.SMALL[name].form)
    split = feeding.split(data, 0.1)
    check_data(split)
    num_held_out = round(0.1 * data.examples)
    assert split.examples == data.examples - num_held_out - data.overlapping
    assert len(next(iter(split.test.values()))) == -(-num_held_out // data.covering)
    assert split.test.keys() == data.test.keys()
    assert split.groups.keys() == data.groups.keys()
    for group in split.groups:
        assert sampling.shards(group, split.groups, split.examples, 4, 0)
    if "y" in split.test:
        numbers = np.arange(0, split.examples, 7)
        labels = feeding.gather(split.train, numbers)["y"]
        np.testing.assert_array_equal(split.groups["label"][numbers], labels)
    elif name != "gpt2_synthetic":  # its windows are made one by one
        assert split.overlapping or "number" in split.test


def test_both_parts_together_are_the_training_data_and_groups_follow():
    speakers = np.random.default_rng(1).integers(0, 6, N)
    for groups in ({}, {"label": LABELS, "speaker": speakers}):
        split = feeding.split(numbered(groups=groups), 0.15)
        assert len(split.test["number"]) == 150
        all_numbers = np.concatenate([split.train["number"], split.test["number"]])
        np.testing.assert_array_equal(np.sort(all_numbers), np.arange(N))
        for name, group in groups.items():
            train_group = group[split.train["number"]]
            np.testing.assert_array_equal(split.groups[name], train_group)


@pytest.mark.parametrize("share", [0.01, 0.1, 0.33, 0.9])
def test_each_label_is_held_out_in_proportion_to_within_one(share):
    split = feeding.split(numbered(groups={"label": LABELS}), share)
    for label in range(7):
        num_held_out = (LABELS[split.test["number"]] == label).sum()
        expected = share * np.bincount(LABELS)[label]
        assert abs(num_held_out - expected) < 1 + 1e-9


@pytest.mark.parametrize("groups", [{}, {"label": LABELS}])
def test_the_part_is_drawn_at_random_and_always_the_same(groups):
    """Its mean place is the middle of the data, of labels in order too."""
    split, same_split = (feeding.split(numbered(groups=groups), 0.3) for _ in range(2))
    held_out_numbers = split.test["number"]
    np.testing.assert_array_equal(held_out_numbers, same_split.test["number"])
    assert abs(held_out_numbers.mean() - N / 2) < 5 * 289 / np.sqrt(300)
    assert len(np.unique(np.diff(held_out_numbers))) > 3  # not every third
    within = (
        held_out_numbers[LABELS[held_out_numbers] == 3] - np.flatnonzero(LABELS == 3)[0]
    )
    size = (LABELS == 3).sum()
    assert abs(within.mean() - size / 2) < 5 * 0.29 * size / np.sqrt(0.3 * size)


def test_a_split_reads_only_the_size_of_the_test_data():
    without_values = {"number": range(70)}
    split = feeding.split(numbered()._replace(test=without_values), 0.1)
    assert len(split.test["number"]) == 100
    assert split.num_test == 70


def test_the_part_of_a_part_is_of_what_was_left():
    once = feeding.split(numbered(groups={"label": LABELS}), 0.2)
    twice = feeding.split(once, 0.25)
    assert twice.examples == 600 and len(twice.test["number"]) == 200
    assert not set(twice.test["number"]) & set(once.test["number"])
    assert set(twice.test["number"]) <= set(once.train["number"])


@pytest.fixture
def places(monkeypatch):
    """A text of 20,000 letters or words, each its own place, 2,000 held out."""
    for name, size in {"characters": 65, "words": 12_631}.items():
        codes = (np.zeros(1), range(size))
        monkeypatch.setattr(tokens, name, lambda _, codes=codes: codes)
    monkeypatch.setattr(tokens, "shakespeare", lambda folder: "")
    parts = np.arange(18_000), np.arange(18_000, 20_000)
    monkeypatch.setattr(tokens, "split", lambda codes: parts)


TEXTS = [("shakespeare", {"context": n}) for n in (1, 20, 60, 64)]
TEXTS += [("embeddings", {"order": n}) for n in (2, 5)]


@pytest.mark.parametrize(("name", "flags"), TEXTS)
@pytest.mark.usefixtures("places")
def test_no_place_of_a_text_is_in_both_parts(name, flags):
    data = small_tasks.make(name, **flags).load()
    split = feeding.split(data, 0.1)
    (leaf,) = data.train
    trained, held_out_places = (
        np.unique(part[leaf]) for part in (split.train, split.test)
    )
    assert trained.max() < held_out_places.min()
    assert trained.max() < data.test[leaf].min() > held_out_places.max()
    # No more is lost than there must be: one window more would overlap.
    first_lost_window = data.train[leaf][split.examples]
    assert not split.overlapping or first_lost_window.max() >= held_out_places.min()
    np.testing.assert_array_equal(
        held_out_places, np.arange(held_out_places[0], held_out_places[-1] + 1)
    )


@pytest.mark.parametrize(("name", "flags"), TEXTS)
@pytest.mark.usefixtures("places")
def test_a_held_out_place_is_predicted_once(name, flags):
    split = feeding.split(small_tasks.make(name, **flags).load(), 0.1)
    if name == "embeddings":
        predicted = split.test["ngram"][:, -1]
    else:
        predicted = split.test["window"][:, 1:].reshape(-1)
    once = np.arange(predicted.min(), predicted.max() + 1)
    np.testing.assert_array_equal(np.sort(predicted), once)


def test_of_a_source_only_what_is_held_out_is_read():
    source = Numbers()
    split = feeding.split(Data(source, UNSEEN, {"label": LABELS}), 0.1)
    assert sorted(source.read) == split.test["number"].tolist()
    arrays = feeding.split(numbered(groups={"label": LABELS}), 0.1)
    np.testing.assert_array_equal(split.test["number"], arrays.test["number"])
    rows = np.random.default_rng(0).integers(0, 900, (3, 8))
    for batch in feeding.read_ahead(split.train, [(0, 3)], lambda *_: rows):
        np.testing.assert_array_equal(batch["number"], arrays.train["number"][rows])
    with pytest.raises(IndexError):
        split.train[900]


@pytest.mark.slow
def test_speakers_are_those_of_the_recordings_to_train_on():
    data = load("spoken_digits")
    loaded = formats.recordings(small_tasks.task_folder("spoken_digits"))
    names = ["george", "jackson", "lucas", "nicolas", "theo", "yweweler"]
    expected = [names.index(r.speaker) for r in loaded if r.take >= 5]
    np.testing.assert_array_equal(data.groups["speaker"], expected)
    digits = [r.digit for r in loaded if r.take >= 5]
    np.testing.assert_array_equal(data.groups["label"], digits)


def test_labels_of_generated_pictures_are_known_without_making_one(monkeypatch):
    flags = {"image_size": 32, "classes": 5, "examples": 200}
    data = small_tasks.make("imagenet_synthetic", **flags).load()
    labels = [int(data.train[number]["y"]) for number in range(200)]
    np.testing.assert_array_equal(data.groups["label"], labels)
    assert set(labels) == set(range(5))

    def make(pictures, number):
        raise AssertionError(f"picture {number} is made")

    monkeypatch.setattr(type(data.train), "__getitem__", make)
    np.testing.assert_array_equal(data.train.labels(), labels)
