"""Tables with few rows that are not zeros, against the mean."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reducing import (
    assert_close,
    mean_over_workers,
    means,
    normal,
    normal_tree,
    run,
    side_by_side,
)

import syncalgos
from syncalgos.engine.placement.make_layout import BACKENDS
from syncalgos.reducers import row_sparse


def test_row_sparse_is_the_mean_of_few_rows():
    table = np.zeros((2, 3, 100, 4), np.float32)
    for step in range(2):
        for worker, rows in enumerate([(0, 5, 99), (5, 6), ()]):
            table[step, worker, list(rows)] = normal((4,), len(rows), 1)[:, 0]
    updates = {"bias": normal((5,), steps=2), "table": table}
    combined, sent, _ = run(row_sparse(3, {"bias": False, "table": True}), updates)
    assert_close(combined, means(updates))
    assert_close(sent, updates)


def test_tables_of_one_name_are_read_at_the_rows_that_either_touches():
    updates = {
        "other": np.zeros((1, 2, 8, 1), np.float32),
        "scale": np.zeros((1, 2, 9), np.float32),
        "table": np.zeros((1, 2, 9, 3), np.float32),
    }
    updates["table"][0, 0, 2] = 1
    updates["scale"][0, 0, 4] = 2  # a row that is zeros in the table
    updates["scale"][0, 1, 2] = 3
    updates["other"][0, 1, 7] = 4
    names = {"other": "users", "scale": "words", "table": "words"}
    combined, _, _ = run(row_sparse(2, lambda tree: names), updates)
    assert_close(combined, means(updates))


def test_row_sparse_shows_rows_that_it_has_no_room_for():
    x = np.zeros((1, 2, 10, 2), np.float32)
    x[0, 1, :4] = 1
    both = side_by_side({rows: row_sparse(rows, True) for rows in (3, 4)})
    combined, _, _ = run(both, x)
    assert np.isnan(combined[3][0, :, :3]).all()
    assert_close(combined[4], mean_over_workers(x))


def test_row_sparse_averages_the_leaves_behind_a_first_table():
    updates = normal_tree(a_table=(9, 2), bias=(4,), matrix=(5, 2))
    tables = {"a_table": True, "bias": False, "matrix": False}
    combined, _, _ = run(row_sparse(9, tables), updates)
    assert_close(combined, means(updates))


def test_row_sparse_takes_booleans_of_numpy():
    updates = normal_tree(bias=(4,), one=(9, 2), other=(5, 2))
    tables = {"bias": np.False_, "one": np.True_, "other": np.True_}
    combined, _, _ = run(row_sparse(9, tables), updates)
    assert_close(combined, means(updates))


def test_row_sparse_keeps_an_empty_table():
    updates = {"table": np.zeros((1, 2, 0, 3), np.float32)}
    combined, _, _ = run(row_sparse(1, True), updates)
    assert combined["table"].shape == (1, 2, 0, 3)


def test_tables_of_one_name_and_unequal_rows_are_refused():
    updates = normal_tree(one=(5, 2), other=(4, 2))
    message = "tables must have rows, and tables of one name equally many, got"
    with pytest.raises(ValueError, match=message):
        run(row_sparse(2, {"one": "words", "other": "words"}), updates)


def test_each_name_has_rows_of_its_own():
    updates = {
        "users": np.zeros((1, 2, 50, 2), np.float32),
        "words": np.zeros((1, 2, 9, 3), np.float32),
        "word_scale": np.zeros((1, 2, 9), np.float32),
    }
    updates["users"][0, 0, 7:8] = updates["users"][0, 1, 49:] = 1
    updates["words"][0, :, 2:5] = normal((3, 3), workers=2)
    updates["word_scale"][0, 1, 5] = 4
    names = {"users": "users", "words": "words", "word_scale": "words"}
    enough = row_sparse({"words": 4, "users": 1}, names)
    short = row_sparse({"words": 3, "users": 1}, names)
    combined, _, _ = run(side_by_side({"enough": enough, "short": short}), updates)
    assert_close(combined["enough"], means(updates))
    assert_close(combined["short"]["users"], means(updates)["users"])
    assert np.isnan(combined["short"]["words"]).any()


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        ({"wrods": 3}, "words", r"rows lack 'words' \(they have: wrods\)"),
        (
            {"words": 3, "wrods": 3},
            "words",
            r"unknown table in row_sparse's rows, 'wrods'; did you mean 'words'\?",
        ),
        ({"words": 3}, True, "rows by name need names in tables, got True"),
    ],
)
def test_rows_of_other_names_than_the_tables_are_refused(rows, tables, message):
    updates = normal_tree(one=(5, 2), other=(5, 2))
    labels = {"one": tables, "other": False}
    with pytest.raises(ValueError, match=message):
        run(row_sparse(rows, labels), updates)


@pytest.mark.parametrize("value", [0, 2.5, True, "3"])
def test_rows_of_a_name_that_are_no_number_are_refused(value):
    message = r"row_sparse: rows\['words'\] must be a whole number of at least 1"
    with pytest.raises(ValueError, match=message):
        row_sparse({"words": value}, "words")


WORDS, STEPS, BATCH, LR = 40, 3, 12, 0.5
RNG = np.random.default_rng(0)
FIRST, SECOND = RNG.integers(0, WORDS, size=(2, STEPS, BATCH))
FIRST[:, 1] = SECOND[:, 2] = FIRST[:, 0]  # rows that a batch touches more than once
TARGET = RNG.normal(size=(STEPS, BATCH))
START = {"bias": RNG.normal(size=WORDS), "words": RNG.normal(size=(WORDS, 3))}


@syncalgos.stateless
def pairs_loss(params, batch):
    """One table is gathered twice, and two tables by the same numbers."""
    first, second, target = batch
    words, bias = params["words"], params["bias"]
    output = jnp.sum(words[first] * words[second], -1) + bias[first]
    return jnp.mean((output - target) ** 2) / 2


def trained_with_dense_gradients():
    """Gradient descent on `pairs_loss`, its gradient by hand, in NumPy."""
    bias, words = START["bias"].copy(), START["words"].copy()
    for first, second, target in zip(FIRST, SECOND, TARGET, strict=True):
        output = np.sum(words[first] * words[second], -1) + bias[first]
        error = (output - target) / BATCH
        to_words, to_bias = np.zeros_like(words), np.zeros_like(bias)
        np.add.at(to_words, first, error[:, None] * words[second])
        np.add.at(to_words, second, error[:, None] * words[first])
        np.add.at(to_bias, first, error)
        bias, words = bias - LR * to_bias, words - LR * to_words
    return {"bias": bias, "words": words}


# A worker of three has four examples: a word and another each.
LIMITS = {
    "apart": (8, True),
    "of one name": (8, {"bias": "words", "words": "words"}),
    "of two names": ({"bias": 4, "words": 8}, {"bias": "bias", "words": "words"}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("rows", "tables"), LIMITS.values(), ids=LIMITS)
def test_gradients_of_tables_that_share_rows_are_the_dense_ones(rows, tables, backend):
    reducer = row_sparse(rows, tables)
    with jax.enable_x64(True):
        trainer = syncalgos.DataParallel(
            pairs_loss,
            optax.sgd(LR),
            syncalgos.sync_sgd(reduce=reducer),
            workers=3,
            backend=backend,
        )
        state, _ = trainer.run(trainer.init(START), (FIRST, SECOND, TARGET))
        trained = trainer.center(state).params
    assert_close(trained, trained_with_dense_gradients(), tolerance=1e-12)
