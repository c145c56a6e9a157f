"""A sample of the kills that kills.py makes of every algorithm."""

import random

import pytest
from faults import commands
from kills import KINDS, attack, kept_programs

from syncalgos import ALGORITHMS

SEED = 0
CHOSEN = random.Random(SEED).sample(sorted(ALGORITHMS), 4)


@pytest.mark.long
@pytest.mark.parametrize("number, name", list(enumerate(CHOSEN)))
def test_killed_runs_end_as_if_nothing_had_been(number, name, tmp_path):
    together = [KINDS[number % len(KINDS)]] if number % 2 == 0 else []
    draw = random.Random(f"{SEED} {name}")
    with commands(tmp_path, **kept_programs(tmp_path / "programs")) as start:
        attack(start, name, tmp_path, KINDS, together, draw)
