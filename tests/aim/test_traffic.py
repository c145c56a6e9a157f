"""Traffic of compiled programs: when, between whom, over which network."""

from fractions import Fraction
from typing import NamedTuple

import pytest

from experiments.aim import hlo
from experiments.aim.times import traffic


class FakeDevice(NamedTuple):
    """The place of a device."""

    id: int
    platform: str = "gpu"
    process_index: int = 0
    slice_index: int | None = None


HOSTS = [FakeDevice(i, process_index=i // 4) for i in range(8)]
SLICES = [
    FakeDevice(100_000 * (s + 1) + i, "tpu", 2 * s + i // 2, s)
    for s in range(2)
    for i in range(4)
]


def sent(kind="all_reduce", groups=((0, 1, 2, 3),), size=100, **others):
    return hlo.Collective(kind, Fraction(size), [list(x) for x in groups], **others)


def rows_of(*collectives, devices=HOSTS, each=1):
    return traffic(collectives, devices, each)


@pytest.mark.parametrize(
    ("each", "scope"), [(1, "across workers"), (4, "inside a worker")]
)
def test_scope_is_that_of_the_workers(each, scope):
    [row] = rows_of(sent(), each=each)
    assert row.scope == scope


@pytest.mark.parametrize(
    ("groups", "network", "rings"),
    [
        ([(0, 1, 2, 3), (4, 5, 6, 7)], "inside", 1),
        ([(0, 4), (1, 5), (2, 6), (3, 7)], "between", 1),
        ([(0, 1, 2, 3, 4, 5, 6, 7)], "between", 4),
        ([(0, 1, 4, 5), (2, 3, 6, 7)], "between", 2),
    ],
)
def test_network_is_between_hosts_where_a_group_is_on_several(groups, network, rings):
    [row] = rows_of(sent(groups=groups))
    found = row.network, row.group, row.rings
    assert found == (network, len(groups[0]), rings)


def test_all_to_all_sends_to_each_device_itself():
    [row] = rows_of(sent("all_to_all", [range(8)]))
    assert (row.network, row.rings) == ("between", 1)


def test_transfers_between_slices_are_of_the_devices_with_these_ids():
    inside = sent("reduce_scatter", [(0, 1, 2, 3)])
    between = sent(groups=[(100_000, 200_000), (100_003, 200_003)], slices=True)
    first, second = rows_of(inside, between, devices=SLICES, each=4)
    assert (first.scope, first.network) == ("inside a worker", "inside")
    assert (second.scope, second.network) == ("across workers", "between")
    assert second.group == 2


def test_when_is_told_by_loops_and_branches():
    rows = rows_of(
        sent(),
        sent(is_looped=True),
        sent(is_looped=True, choices=(("conditional.2", "region"),)),
    )
    assert [x.when for x in rows] == ["dispatch", "step", "sync"]
    assert (rows[2].choice, rows[2].branch) == ("conditional.2", "region")


def test_a_branch_that_sends_nothing_across_workers_is_no_sync():
    """Compilers cut the products of every step into windows by conditionals."""
    alone = (("conditional.1", "a"),)
    sync = (("conditional.2", "b"),)
    rows = rows_of(
        sent(is_looped=True, choices=alone),
        sent(size=1, is_looped=True, choices=sync),
        sent(groups=[range(8)], is_looped=True, choices=sync),
        each=4,
    )
    found = [(x.scope, x.when) for x in rows]
    inside = [("inside a worker", "step"), ("inside a worker", "sync")]
    assert found == [*inside, ("across workers", "sync")]


def test_alike_collectives_are_one_row_and_add_up_with_their_loops():
    first, second = rows_of(
        sent(size=100, times=3, overlapped=True),
        sent(size=7, promoted=True),
        sent(size=1, kind="all_gather"),
    )
    assert (first.calls, first.bytes) == (4, 3 * 100 + 7)
    assert (first.overlapped, first.promoted) == (3, 1)
    assert (second.kind, second.calls, second.bytes) == ("all_gather", 1, 1)


def test_permutations_count_the_device_that_sends_most():
    [row] = rows_of(
        sent("permute", [(0, 1), (1, 2)], 100),
        sent("permute", [(1, 3)], 10),
        sent("permute", [(2, 3)], 50),
    )
    assert (row.calls, row.bytes) == (3, 110)


def test_a_group_of_one_sends_nothing():
    assert rows_of(sent(groups=[(0,), (1,)])) == []
