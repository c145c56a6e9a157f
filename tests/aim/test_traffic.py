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
    *(FakeDevice(100_000 + i, "tpu", i // 2, 0) for i in range(4)),
    *(FakeDevice(200_000 + i, "tpu", 2 + i // 2, 1) for i in range(4)),
]


def collective(kind="all_reduce", groups=((0, 1, 2, 3),), size=100, **fields):
    return hlo.Collective(kind, Fraction(size), [list(x) for x in groups], **fields)


def traffic_rows(*collectives, devices=HOSTS, devices_each=1):
    return traffic(collectives, devices, devices_each)


@pytest.mark.parametrize(
    ("devices_each", "scope"), [(1, "across workers"), (4, "inside a worker")]
)
def test_scope_is_that_of_the_workers(devices_each, scope):
    [row] = traffic_rows(collective(), devices_each=devices_each)
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
    [row] = traffic_rows(collective(groups=groups))
    place = row.network, row.group, row.rings
    assert place == (network, len(groups[0]), rings)


def test_all_to_all_sends_to_each_device_itself():
    [row] = traffic_rows(collective("all_to_all", [range(8)]))
    assert (row.network, row.rings) == ("between", 1)


def test_transfers_between_slices_are_of_the_devices_with_these_ids():
    inside = collective("reduce_scatter", [(0, 1, 2, 3)])
    between = collective(groups=[(100_000, 200_000), (100_003, 200_003)], slices=True)
    inside_row, between_row = traffic_rows(
        inside, between, devices=SLICES, devices_each=4
    )
    assert (inside_row.scope, inside_row.network) == ("inside a worker", "inside")
    assert (between_row.scope, between_row.network) == ("across workers", "between")
    assert between_row.group == 2


def test_when_is_told_by_loops_and_branches():
    rows = traffic_rows(
        collective(),
        collective(is_looped=True),
        collective(is_looped=True, choices=(("conditional.2", "region"),)),
    )
    assert [x.when for x in rows] == ["dispatch", "step", "sync"]
    assert (rows[2].choice, rows[2].branch) == ("conditional.2", "region")


def test_a_branch_that_sends_nothing_across_workers_is_no_sync():
    """Compilers cut the products of every step into windows by conditionals."""
    alone = (("conditional.1", "a"),)
    sync = (("conditional.2", "b"),)
    rows = traffic_rows(
        collective(is_looped=True, choices=alone),
        collective(size=1, is_looped=True, choices=sync),
        collective(groups=[range(8)], is_looped=True, choices=sync),
        devices_each=4,
    )
    scopes = [(x.scope, x.when) for x in rows]
    inside = [("inside a worker", "step"), ("inside a worker", "sync")]
    assert scopes == [*inside, ("across workers", "sync")]


def test_alike_collectives_are_one_row_and_add_up_with_their_loops():
    reduce_row, gather_row = traffic_rows(
        collective(size=100, times=3, overlapped=True),
        collective(size=7, promoted=True),
        collective(size=1, kind="all_gather"),
    )
    assert (reduce_row.calls, reduce_row.bytes) == (4, 3 * 100 + 7)
    assert (reduce_row.overlapped, reduce_row.promoted) == (3, 1)
    assert (gather_row.kind, gather_row.calls, gather_row.bytes) == ("all_gather", 1, 1)


def test_permutations_count_the_device_that_sends_most():
    [row] = traffic_rows(
        collective("permute", [(0, 1), (1, 2)], 100),
        collective("permute", [(1, 3)], 10),
        collective("permute", [(2, 3)], 50),
    )
    assert (row.calls, row.bytes) == (3, 110)


def test_a_group_of_one_sends_nothing():
    assert traffic_rows(collective(groups=[(0,), (1,)])) == []
