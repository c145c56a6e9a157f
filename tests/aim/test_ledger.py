"""The ledger against compilers: what each algorithm sends on TPUs and H100s.

CPUs' programs are read by tests/engine/meshes/test_meshes.py.
"""

import importlib.util
import itertools

import pytest
from support.chosen_tests import chosen_values
from support.device_processes import run_module
from support.requirements import owed

from syncalgos import ALGORITHMS

# A TPU's compiler makes all-reduces of gathers of a few numbers, such as scales.
FEW_BYTES = 1024
MACHINES = {  # the target, its slices, workers, and the compiler's module
    "tpu 2x4": ("tpu:v5e:2x4", 1, 2, "libtpu"),
    "tpu 8x1": ("tpu:v5e:2x4", 1, 8, "libtpu"),
    "h100 2x4": ("cuda:h100:2x4", 1, 2, "jax_cuda13_plugin"),
}
SLICES = ("tpu:v5e:2x4", 2, 2, "libtpu")
# Reduced; and on one machine, permuted, gathered, in groups, by all-to-alls and as
# factors. The rest is long.
SLOW = ("bmuf",)
SLOW_ONCE = ("gossip", "topk_sgd", "hierarchical", "quantized_sgd", "powersgd")


def cases():
    for machine, name in itertools.product(MACHINES, ALGORITHMS):
        is_first = machine == "tpu 2x4"
        is_slow = name in SLOW + SLOW_ONCE * is_first
        marks = pytest.mark.slow if is_slow else pytest.mark.long
        yield pytest.param(MACHINES[machine], name, marks=marks, id=f"{machine}-{name}")


def compiled(machine, names):
    """Has `ledgers` compile these algorithms, in one process."""
    target, slices, workers, module = machine
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed: no compiler for {target}")
    return run_module("compiled_ledgers", target, str(slices), str(workers), *names)


@pytest.mark.parametrize(("machine", "name"), list(cases()))
def test_a_compiled_step_sends_what_is_counted(machine, name, request):
    """And changes all of its state in place."""
    names = dict.fromkeys(chosen_values(request, "name", machine=machine))
    ledger = compiled(machine, names)[name]
    assert ledger["aliased"] >= ledger["state"] > 0
    counted = ledger["counted"]
    sent_bytes = ledger["sent"]
    extra_bytes = {
        kind: sent_bytes.get(kind, 0) - counted.get(kind, 0)
        for kind in {*sent_bytes, *counted}
        if sent_bytes.get(kind, 0) != counted.get(kind, 0)
    }
    if extra_bytes and machine[0].startswith("tpu"):
        assert extra_bytes.keys() == {"all_gather", "all_reduce"}
        assert 0 < -extra_bytes["all_gather"] <= extra_bytes["all_reduce"] <= FEW_BYTES
    else:
        assert not extra_bytes
    # XLA joins the arrays of a sync, or leaves them as they are.
    assert sum(ledger["calls"].values()) <= sum(ledger["counted_calls"].values())
    steps = 8
    if not owed(name).decided and len(owed(name).send_steps) < steps and sent_bytes:
        assert ledger["when"] == ["sync"]
    # A TPU's slice is one network, and hosts of GPUs are two.
    assert ledger["networks"] == ["between" if "h100" in machine[0] else "inside"]


@pytest.mark.slow
def test_slices_send_whole_tiles_to_one_another():
    for name, ledger in compiled(SLICES, ("bmuf", "gossip")).items():
        [(kind, counted)] = ledger["counted"].items()
        # Each leaf's shard is filled up to 1,024 numbers where it is reduced.
        tiles = 4 * 4096 if kind == "all_reduce" else 0
        assert ledger["sent"].keys() == {kind}, name
        assert ledger["networks"] == ["between"], name
        assert counted <= ledger["sent"][kind] <= counted + tiles, name
