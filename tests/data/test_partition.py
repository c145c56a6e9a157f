"""Partitions: the examples of each worker, and their order."""

import numpy as np
import pytest
import scipy.stats

from experiments.data import sampling

RNG = np.random.default_rng(0)
LABELS = np.sort(RNG.integers(0, 10, 1437))  # sorted, as some data sets come
GROUPS = {"label": LABELS, "speaker": RNG.integers(0, 6, 1437)}
KINDS = ["label", "speaker", "dirichlet:0.3", "dirichlet:1e8"]


def shards(kind, workers=8, seed=0, groups=GROUPS):
    parts = sampling.shards(kind, groups, len(groups["label"]), workers, seed)
    assert parts is not None
    return parts


def counts(parts, labels):
    """Counts the examples of each label, (workers, labels)."""
    is_label = labels == np.unique(labels)[:, None]  # (labels, examples)
    return np.array([is_label[:, part].sum(1) for part in parts])


def even_labels(labels, examples_per_label):
    return {"label": np.repeat(np.arange(labels), examples_per_label)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [1, 2, 7, 8])
def test_every_example_is_one_workers_own(kind, workers):
    parts = shards(kind, workers)
    assert len(parts) == workers
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(1437))


@pytest.mark.parametrize("kind", KINDS)
def test_a_partition_follows_its_seed(kind):
    shards_of_3, again_of_3, shards_of_4 = (
        shards(kind, seed=seed) for seed in (3, 3, 4)
    )
    for shard, same_shard in zip(shards_of_3, again_of_3, strict=True):
        np.testing.assert_array_equal(shard, same_shard)
    assert any(set(a) != set(b) for a, b in zip(shards_of_3, shards_of_4, strict=True))


def test_iid_has_no_shards_whatever_the_groups():
    for groups in (GROUPS, {}):
        assert sampling.shards("iid", groups, 1437, 8, 0) is None


@pytest.mark.parametrize("kind", ["label", "speaker"])
@pytest.mark.parametrize("workers", [3, 10, 64, 1437])
def test_groups_are_cut_into_equal_parts_of_few_groups(kind, workers):
    """Each of the cuts between workers splits at most one group."""
    parts = shards(kind, workers)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    num_groups = sum(len(np.unique(GROUPS[kind][part])) for part in parts)
    assert num_groups <= workers + len(np.unique(GROUPS[kind])) - 1


def test_which_group_comes_first_is_drawn():
    groups = even_labels(4, 5)
    first_labels = [
        groups["label"][shards("label", 4, s, groups)[0][0]] for s in range(400)
    ]
    assert scipy.stats.chisquare(np.bincount(first_labels)).pvalue > 1e-3


def test_a_cut_group_is_dealt_at_random_not_in_its_order():
    """Half of one label: as many of its early examples as of its late ones."""
    early = int((shards("label", 2, 0, even_labels(1, 1000))[0] < 500).sum())
    assert abs(early - 250) < 5 * 8  # hypergeometric: deviation 7.9


@pytest.mark.parametrize("workers", [3, 8])
def test_a_dirichlet_of_large_alpha_gives_all_workers_as_much_of_each_label(workers):
    groups = even_labels(10, 144)
    counts_by_worker = counts(
        shards("dirichlet:1e8", workers, 0, groups), groups["label"]
    )
    assert (
        np.abs(counts_by_worker - 144 / workers).max() <= 1
    )  # the rounding of two ends


@pytest.mark.parametrize("alpha", [0.1, 1, 10])
def test_shares_of_a_label_have_the_moments_of_the_dirichlet(alpha):
    """Mean 1/n and variance (1/n)(1 - 1/n) / (nα + 1)."""
    groups = even_labels(600, 500)
    workers = 3
    parts = shards(f"dirichlet:{alpha}", workers, 0, groups)
    shares = np.array([np.bincount(groups["label"][p], minlength=600) for p in parts])
    shares = shares / 500
    variance = (1 / workers) * (1 - 1 / workers) / (workers * alpha + 1)
    error = np.sqrt(variance / 600)  # of the mean over labels
    np.testing.assert_allclose(shares.mean(1), 1 / workers, atol=5 * error)
    np.testing.assert_allclose(shares.var(1), variance, rtol=0.2)  # ~5 deviations


def test_dirichlet_examples_of_a_label_are_dealt_at_random_not_in_their_order():
    for part in shards("dirichlet:1e8", 3, 0, even_labels(1, 3000)):
        assert abs(part.mean() - 1500) < 5 * 866 / np.sqrt(1000)


@pytest.mark.parametrize("seed", range(3))
def test_a_dirichlet_leaves_every_worker_ten_examples(seed):
    sizes = [len(part) for part in shards("dirichlet:0.05", 6, seed)]
    assert min(sizes) >= 10 and max(sizes) > 2 * min(sizes)


@pytest.mark.parametrize("kind", ["iid", "label", "speaker", "author", *KINDS])
def test_well_written_kinds_pass_before_data_is_loaded(kind):
    sampling.find_alpha(kind)


# Unlike sizes: of many epochs in a part, of one, and a single example.
SHARDS = np.split(np.random.default_rng(1).permutation(3000), [1, 8, 45, 145, 1500])
WORKERS = len(SHARDS)


@pytest.mark.parametrize("worker_batch", [1, 5, 64])
def test_each_epoch_of_a_shard_takes_each_of_its_examples_once(worker_batch):
    steps = 3000 // worker_batch
    rows = sampling.rows_of_shards(1, 0, steps, worker_batch * WORKERS, SHARDS)
    assert rows.dtype == np.int32
    slices = rows.reshape(steps, WORKERS, worker_batch)
    for worker, shard in enumerate(SHARDS):
        flat = slices[:, worker].reshape(-1)
        epochs = flat[: len(flat) // len(shard) * len(shard)].reshape(-1, len(shard))
        assert len(epochs) == steps * worker_batch // len(
            shard
        )  # small ones come sooner
        expected = np.broadcast_to(np.sort(shard), epochs.shape)
        np.testing.assert_array_equal(np.sort(epochs, axis=1), expected)
        if len(shard) > 30 and len(epochs) > 1:
            assert len({tuple(epoch) for epoch in epochs}) == len(epochs)


def test_a_shards_stream_is_a_function_of_seed_worker_and_step():
    batch = 4 * WORKERS
    all_rows = sampling.rows_of_shards(3, 0, 900, batch, SHARDS)
    for start, steps in [(899, 1), (0, 1), (3, 50), (250, 1), (1, 899), (249, 600)]:
        part = sampling.rows_of_shards(3, start, steps, batch, SHARDS)
        np.testing.assert_array_equal(part, all_rows[start : start + steps])
    assert (sampling.rows_of_shards(4, 0, 900, batch, SHARDS) != all_rows).any()


def test_workers_with_equal_shards_draw_in_orders_of_their_own():
    equal_shards = [np.arange(50)] * 3
    rows = sampling.rows_of_shards(0, 0, 10, 15, equal_shards).reshape(10, 3, 5)
    orders = {tuple(rows[:, worker].reshape(-1)) for worker in range(3)}
    assert len(orders) == 3
    assert tuple(sampling.rows(0, 0, 10, 5, 50).reshape(-1)) not in orders


def test_orders_of_a_shard_are_uniform():
    """All six orders of three examples, in parts of many epochs, as often."""
    rows = sampling.rows_of_shards(0, 0, 3 * 6000, 1, [np.arange(3)]).reshape(-1, 3)
    _, times = np.unique(rows, axis=0, return_counts=True)
    assert len(times) == 6 and scipy.stats.chisquare(times).pvalue > 1e-3


def test_orders_of_256_workers_are_drawn_once_not_at_every_dispatch(monkeypatch):
    drawn = []
    make_generator = np.random.default_rng

    def counted(key):
        drawn.append(key)
        return make_generator(key)

    monkeypatch.setattr(np.random, "default_rng", counted)
    parts = np.array_split(np.arange(256 * 1100), 256)
    for dispatch in range(20):
        sampling.rows_of_shards(77, 5 * dispatch, 5, 2 * 256, parts)
    assert len(drawn) == 256
