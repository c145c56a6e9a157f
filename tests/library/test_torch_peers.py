"""Peers over torch's gloo, in real processes."""

import functools
import importlib.util
import json
import pickle

import numpy as np
import pytest
from support import peer_training
from support.commands import members

import syncalgos

OF_EACH_KIND = "bmuf", "sign_sgd", "gossip", "push_sum", "sparta", "topk_sgd"


@pytest.fixture(autouse=True, scope="module")
def torch():
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install -e '.[benchmarks]'")


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(OF_EACH_KIND, id="of each kind", marks=pytest.mark.slow),
        pytest.param(sorted(syncalgos.ALGORITHMS), id="all", marks=pytest.mark.long),
    ],
)
def test_algorithms_over_gloo_agree_with_data_parallel(names, tmp_path):
    members(
        "gloo_workers",
        peer_training.WORKERS,
        tmp_path,
        1200,
        by_jax=False,
        PEERS_NAMES=",".join(names),
    )
    results = [
        pickle.loads((tmp_path / f"{rank}.pickle").read_bytes())
        for rank in range(peer_training.WORKERS)
    ]
    for result in results:
        np.testing.assert_array_equal(result["bfloat16"], 2)
    differences = {}
    for name in names:
        make = functools.partial(peer_training.make_strategy, name)
        expected = peer_training.train_by_data_parallel(make)
        runs = [result[name] for result in results]
        assert not any(isinstance(run, str) for run in runs), (name, runs)
        differences[name] = peer_training.difference(runs, expected)
        sent_bytes = peer_training.count_largest_sends(runs)
        np.testing.assert_allclose(sent_bytes, expected.sent_bytes, rtol=1e-9)
    print(f"largest difference of {len(names)}: {max(differences.values()):.1e}")
    assert {name: x for name, x in differences.items() if not x < 1e-5} == {}


@pytest.mark.slow
def test_a_killed_process_is_one_line_and_the_others_train_on(tmp_path):
    members("lost_peer", 3, tmp_path, 120, by_jax=False, killed=[2])
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    for result in results:
        (message,) = result["messages"]
        assert message.startswith("step 5: all_reduce among 3 processes failed (")
        assert "\n" not in message
        assert "join the processes again" in message
    first_center, second_center = (result["center"] for result in results)
    assert first_center == second_center
