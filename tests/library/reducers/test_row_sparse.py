"""Tables with few rows that are not zeros, against the mean."""

import numpy as np
import pytest
from support.reducer_cases import (
    assert_close,
    mean_over_workers,
    means,
    normal,
    normal_tree,
    run,
    side_by_side,
)

from syncalgos.reducers import row_sparse


def test_row_sparse_is_the_mean_of_few_rows():
    table = np.zeros((2, 3, 100, 4), np.float32)
    for step in range(2):
        for worker, rows in enumerate([(0, 5, 99), (5, 6), ()]):
            table[step, worker, list(rows)] = normal((4,), len(rows), 1)[:, 0]
    updates = {"bias": normal((5,), steps=2), "table": table}
    combined, sent_updates, _ = run(
        row_sparse(3, tables={"bias": False, "table": True}), updates
    )
    assert_close(combined, means(updates))
    assert_close(sent_updates, updates)


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
    combined, _, _ = run(row_sparse(2, tables=lambda path, shape: names[path]), updates)
    assert_close(combined, means(updates))


def test_row_sparse_shows_rows_that_it_has_no_room_for():
    x = np.zeros((1, 2, 10, 2), np.float32)
    x[0, 1, :4] = 1
    reducer_pair = side_by_side(
        {rows: row_sparse(rows, tables=True) for rows in (3, 4)}
    )
    combined, _, _ = run(reducer_pair, x)
    assert np.isnan(combined[3][0, :, :3]).all()
    assert_close(combined[4], mean_over_workers(x))


def test_row_sparse_keeps_an_empty_table():
    updates = {"table": np.zeros((1, 2, 0, 3), np.float32)}
    combined, _, _ = run(row_sparse(1, tables=True), updates)
    assert combined["table"].shape == (1, 2, 0, 3)


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
    roomy_reducer = row_sparse({"words": 4, "users": 1}, tables=names)
    tight_reducer = row_sparse({"words": 3, "users": 1}, tables=names)
    combined, _, _ = run(
        side_by_side({"enough": roomy_reducer, "short": tight_reducer}), updates
    )
    assert_close(combined["enough"], means(updates))
    assert_close(combined["short"]["users"], means(updates)["users"])
    assert np.isnan(combined["short"]["words"]).any()


@pytest.mark.parametrize(
    ("rows", "tables", "message"),
    [
        (2, ("words", "words"), "tables of one name equally many, got"),
        ({"wrods": 3}, ("words", False), r"rows lack 'words' \(they have: wrods\)"),
        (
            {"words": 3, "wrods": 3},
            ("words", False),
            r"unknown table in row_sparse's rows, 'wrods'; did you mean 'words'\?",
        ),
        ({"words": 3}, (True, False), "rows by name need names in tables, got True"),
    ],
)
def test_tables_that_rows_do_not_fit_are_refused(rows, tables, message):
    first_table, second_table = tables
    with pytest.raises(ValueError, match=message):
        updates = normal_tree(one=(5, 2), other=(4, 2))
        run(
            row_sparse(rows, tables={"one": first_table, "other": second_table}),
            updates,
        )
