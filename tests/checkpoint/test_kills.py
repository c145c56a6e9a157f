"""Runs that are killed at any moment end as if nothing had been."""

import random

import pytest
from support.faults import commands
from support.kills import KINDS, attack, kept_programs


@pytest.mark.long
@pytest.mark.parametrize(
    "name, together",  # kinds of the kills of one of two processes
    [
        ("scaffold", ["in a save"]),
        ("topk_sgd", []),
        ("streaming_diloco", ["at any moment"]),
        ("async_diloco", []),
    ],
)
def test_killed_runs_end_as_if_nothing_had_been(name, together, tmp_path):
    with commands(tmp_path, **kept_programs(tmp_path / "programs")) as start:
        attack(start, name, tmp_path, KINDS, together, random.Random(name))
