"""Traffic of compiled programs: when, between whom, over which network."""

import functools
import importlib.util
import json
import subprocess
import sys
from fractions import Fraction
from typing import NamedTuple

import pytest
from commands import OTHER_MACHINES, ROOT, environment

from experiments.aiming import hlo
from experiments.aiming.chips import PLATFORMS
from experiments.aiming.traffic import traffic

PARAMS = 4 * 4 * 256 * 256  # bytes of the model of compiled.py
PROGRAM = "tests/aiming/compiled.py"
AVERAGING = {"sync_sgd": "step", "bmuf": "sync"}


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
    program = hlo.Program(list(collectives), 8)
    return traffic(program, devices, each)


@pytest.mark.parametrize(
    ("each", "scope"), [(1, "across workers"), (4, "inside a worker")]
)
def test_scope_is_that_of_the_workers(each, scope):
    [row] = rows_of(sent(), each=each)
    assert row["scope"] == scope


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
    assert (row["network"], row["group"], row["rings"]) == (
        network,
        len(groups[0]),
        rings,
    )


def test_all_to_all_sends_to_each_device_itself():
    [row] = rows_of(sent("all_to_all", [range(8)]))
    assert (row["network"], row["rings"]) == ("between", 1)


def test_transfers_between_slices_are_of_the_devices_with_these_ids():
    inside = sent("reduce_scatter", [(0, 1, 2, 3)])
    between = sent(groups=[(100_000, 200_000), (100_003, 200_003)], slices=True)
    first, second = rows_of(inside, between, devices=SLICES, each=4)
    assert (first["scope"], first["network"]) == ("inside a worker", "inside")
    assert (second["scope"], second["network"]) == ("across workers", "between")
    assert second["group"] == 2


def test_when_is_told_by_loops_and_branches():
    rows = rows_of(
        sent(),
        sent(is_looped=True),
        sent(is_looped=True, choices=(("conditional.2", "region"),)),
    )
    assert [x["when"] for x in rows] == ["dispatch", "step", "sync"]
    assert (rows[2].get("choice"), rows[2].get("branch")) == ("conditional.2", "region")


def test_alike_collectives_are_one_row_and_add_up_with_their_loops():
    rows = rows_of(
        sent(size=100, times=3, overlapped=True),
        sent(size=7, promoted=True),
        sent(size=1, kind="all_gather"),
    )
    first, second = rows
    assert (first["calls"], first["bytes"]) == (4, 3 * 100 + 7)
    assert (first["overlapped"], first.get("promoted")) == (3, 1)
    assert (second["kind"], second["calls"], second["bytes"]) == ("all_gather", 1, 1)


def test_permutations_count_the_device_that_sends_most():
    [row] = rows_of(
        sent("permute", [(0, 1), (1, 2)], 100),
        sent("permute", [(1, 3)], 10),
        sent("permute", [(2, 3)], 50),
    )
    assert (row["calls"], row["bytes"]) == (3, 110)


def test_a_group_of_one_sends_nothing():
    assert rows_of(sent(groups=[(0,), (1,)])) == []


@functools.cache
def compiled(text, slices=1, each=1, names=(*AVERAGING,)):
    """Rows by algorithm, from a process of its own."""
    module = PLATFORMS[text.partition(":")[0]].get("compiler", {}).get("module")
    if module and importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: no compiler for {text}")
    ended = subprocess.run(
        [sys.executable, PROGRAM, text, str(slices), str(each), *names],
        cwd=ROOT,
        env=environment(PYTHONPATH=ROOT, **OTHER_MACHINES),
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout)


def across(rows, when):
    """Bytes between workers, by network and kind."""
    found = {}
    for row in rows:
        if row["scope"] == "across workers" and row["when"] == when:
            key = row["network"], row["kind"], row["group"]
            found[key] = found.get(key, 0) + row["bytes"]
    return found


def reduced(network, workers, size):
    return {(network, "all_reduce", workers): 2 * (workers - 1) / workers * size}


SCATTERED = {  # over the 4 workers of a slice, reduced by the hosts, gathered
    ("inside", "reduce_scatter", 4): 3 / 4 * PARAMS / 2,
    ("between", "all_reduce", 2): 2 * 1 / 2 * PARAMS / 2 / 4,
    ("inside", "all_gather", 4): 3 / 4 * PARAMS / 2,
}


@pytest.mark.parametrize(("name", "when"), AVERAGING.items())
@pytest.mark.parametrize(
    ("text", "slices", "each", "owed"),
    [
        ("cpu:8", 1, 1, reduced("inside", 8, PARAMS)),
        ("cpu:8", 1, 2, reduced("inside", 4, PARAMS / 2)),
        ("tpu:v5e:2x4", 1, 2, reduced("inside", 4, PARAMS / 2)),
        ("tpu:v5e:2x4", 2, 2, SCATTERED),
        ("cuda:h100:2x4", 1, 4, reduced("between", 2, PARAMS / 4)),
    ],
)
def test_workers_average_their_shards_once(name, when, text, slices, each, owed):
    rows = compiled(text, slices, each)[name]
    assert across(rows, when) == owed
    [other] = {"step", "sync"} - {when}
    assert across(rows, other) == {}


@pytest.mark.parametrize(
    ("name", "owed"),
    [
        ("bmuf", reduced("between", 2, PARAMS / 4)),
        ("gossip", {("between", "permute", 2): PARAMS / 4}),  # to one peer
    ],
)
def test_workers_that_are_slices_send_their_shards_over_the_network(name, owed):
    rows = compiled("tpu:v5e:2x2", 2, 4, ("bmuf", "gossip"))[name]
    assert (across(rows, "step") or across(rows, "sync")) == owed


def test_layers_of_a_loop_count_as_often_as_they_run():
    """A worker's devices gather or reduce in each of 4 layers."""
    rows = compiled("cpu:8", each=2)["sync_sgd"]
    inside = [
        x for x in rows if x["scope"] == "inside a worker" and x["when"] == "step"
    ]
    assert sum(x["calls"] for x in inside) >= 4


def test_gpu_workers_of_a_host_use_as_many_rings_as_they_are():
    rows = compiled("cuda:h100:2x4")["bmuf"]
    [row] = [x for x in rows if x["when"] == "sync"]
    assert (row["group"], row["rings"], row["network"]) == (8, 4, "between")
