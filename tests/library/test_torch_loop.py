"""Inside PyTorch: the loop of examples, in two processes, trains as DataParallel."""

import importlib.util
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.commands import members

import syncalgos

NAMES = ["bmuf", "diloco", "sparseloco", "gossip", "sync_sgd", "palsgd", "buffers"]
pytestmark = pytest.mark.slow  # two processes that import torch, and compile


@pytest.fixture(scope="module")
def worker_results(
    tmp_path_factory: pytest.TempPathFactory,
) -> list[tuple[Any, dict[str, str]]]:
    """The arrays that each process wrote, and the errors that it got."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch: pip install -e '.[benchmarks]'")
    folder = tmp_path_factory.mktemp("torch")
    members("torch_workers", 2, folder, 600, by_jax=False)
    return [
        (np.load(folder / f"{i}.npz"), json.loads((folder / f"{i}.json").read_text()))
        for i in (0, 1)
    ]


def select_arrays(
    worker_results: Any, worker: int, name: str, which: str
) -> dict[str, np.ndarray]:
    """Arrays of one worker by their names in the model."""
    arrays = worker_results[worker][0]
    start = f"{name} {which} "
    return {k.removeprefix(start): arrays[k] for k in arrays if k.startswith(start)}


def loss(params: Any, batch: Any) -> jax.Array:
    x = batch["x"]
    y = batch["y"]
    x = (x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)  # torch's batch norm, in training
    x = x * params["0.weight"] + params["0.bias"]
    x = jnp.tanh(x @ params["1.weight"].T + params["1.bias"])
    return ((x @ params["3.weight"].T + params["3.bias"] - y) ** 2).mean()


@pytest.mark.parametrize("name", NAMES)
def test_torch_loop_trains_as_data_parallel_does(worker_results, name):
    from support import torch_workers

    x, y = torch_workers.batches()
    rows = {
        k: a.reshape(torch_workers.STEPS, -1, a.shape[-1])
        for k, a in {"x": x, "y": y}.items()
    }
    optimizer = optax.sgd(torch_workers.LR, torch_workers.MOMENTUM)
    strategy = torch_workers.strategies()[name]
    trainer = syncalgos.DataParallel(
        loss, optimizer, strategy, workers=torch_workers.WORKERS
    )
    params = select_arrays(worker_results, 0, name, "first")
    first_params = {
        k: params[k] for k in params if k[0] != "0" or k in ("0.weight", "0.bias")
    }
    state, _ = trainer.run(trainer.init(first_params), rows)
    center = jax.device_get(trainer.center(state).params)
    stacked = jax.device_get(state.replica.params)
    for worker in range(torch_workers.WORKERS):
        torch_params = select_arrays(worker_results, worker, name, "held")
        torch_center = select_arrays(worker_results, worker, name, "center")
        for key in first_params:
            worker_params = stacked[key].reshape(
                torch_workers.WORKERS, *first_params[key].shape
            )[worker]
            assert np.abs(worker_params - first_params[key]).max() > 1e-2
            # Float32 gradients of two compilers: 22 steps of them differ by some ulps.
            np.testing.assert_allclose(
                torch_params[key], worker_params, rtol=0, atol=1e-6
            )
            np.testing.assert_allclose(
                torch_center[key], center[key], rtol=0, atol=1e-6
            )


@pytest.mark.parametrize("name", NAMES)
def test_resumed_torch_loop_has_the_bits_of_the_unbroken_one(worker_results, name):
    for worker in (0, 1):
        ours, again = (
            select_arrays(worker_results, worker, name, x) for x in ("held", "again")
        )
        assert ours.keys() == again.keys()
        for key, x in ours.items():
            np.testing.assert_array_equal(again[key], x)


@pytest.mark.parametrize("name", ["diloco", "buffers"])
def test_buffers_stay_local_unless_the_strategy_averages_them(worker_results, name):
    from support import torch_workers

    means = (
        torch_workers.batches()[0].astype(np.float64).mean(2)
    )  # (steps, workers, features)
    expected = np.zeros(means.shape[1:])
    for step, mean in enumerate(means, 1):
        expected = 0.9 * expected + 0.1 * mean  # torch's momentum is 0.1
        if name == "buffers" and step % torch_workers.PERIOD == 0:
            expected = np.broadcast_to(expected.mean(0), expected.shape)
    for worker in (0, 1):
        ours = select_arrays(worker_results, worker, name, "held")["0.running_mean"]
        np.testing.assert_allclose(ours, expected[worker], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "case, text",
    [
        ("loss", "no DDP, DTensor, learning_rate, own_steps, loss"),
        ("rate", "learning_rate"),
        ("steps", "own_steps"),
        ("moments", "no moments"),
        ("opt_state", "changes opt_state"),
        ("axis", "axis=Peers"),
        ("ddp", "DDP"),
        ("sharded", "DTensor"),
    ],
)
def test_torch_loop_refuses_in_one_line_what_it_cannot_serve(
    worker_results, case, text
):
    for _, messages in worker_results:
        assert text in messages[case] and "\n" not in messages[case]
