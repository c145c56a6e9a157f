"""Published codes of local methods and ours, on equal inputs.

Their figures were printed, in float32, by the repositories and commits that stand over
them, run by PyTorch 2.13 in two processes that talk through gloo, on the same `wave`s.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from support.reducer_cases import assert_close, descend, wave

import syncalgos

# They print seven digits, and sums of ours are in another order.
TOLERANCE = 1e-5


def least_squares(
    strategy: syncalgos.Strategy,
    optimizer: optax.GradientTransformation,
    steps: int,
    starts: tuple[float, float] = (1, 1),
) -> np.ndarray:
    """Three params in two leaves: (steps, workers, 3). Gradients are h (x - b)."""

    def cut(x: np.ndarray) -> dict[str, np.ndarray]:
        return {"a": x[..., :1], "b": x[..., 1:]}

    def gradient(params: Any, worker_inputs: Any) -> Any:
        return jax.tree.map(lambda x, h, b: h * (x - b), params, *worker_inputs)

    starts = np.float32(starts)[:, None] * wave(3, phase=3.0)
    h = 1 + wave(12, 2, 3, phase=4.0) / 2
    b = wave(12, 2, 3)
    inputs = cut(h[:steps]), cut(b[:steps])
    params = descend(strategy, optimizer, cut(starts), gradient, inputs)
    return np.concatenate([params["a"], params["b"]], axis=-1)


def assert_params_at_steps(params: np.ndarray, figures: dict[int, list]) -> None:
    """Compares with the numbers given for some steps, counted from 1."""
    for step, expected in figures.items():
        assert_close(params[step - 1], np.array(expected), TOLERANCE)


# PyTorch 2.13: DistributedDataParallel with post_localSGD_hook and PostLocalSGDState(
# None, None, switch, post_local_gradient_allreduce=False), SGD(lr=0.1, momentum=0.9),
# then PeriodicModelAverager(period, warmup_steps=switch): both workers' params.
POST_LOCAL = {
    # It averages after steps switch + 1, switch + 1 + period, …: here 4, 8 and 12.
    (3, 4): {
        3: [[0.1273739, -0.369785, -0.2764746]] * 2,
        7: [[0.4636915, -0.03391212, 0.1706125], [0.4731869, 0.02757113, -0.1357756]],
        8: [[0.4533277, 0.01037379, 0.03460122]] * 2,
        11: [
            [-0.1756946, 0.1320743, -0.03680132],
            [-0.2034555, -0.07770061, -0.09880371],
        ],
        12: [[-0.2733869, 0.008820996, -0.1428711]] * 2,
    },
    # And here 5, 8 and 11: one step after multiples of the period and a switch of 4.
    (4, 3): {
        5: [[0.227128, -0.1566834, -0.1586449]] * 2,
        8: [[0.4537425, 0.01263967, 0.03015202]] * 2,
        11: [[-0.188993, 0.02719292, -0.06453653]] * 2,
        12: [
            [-0.2850065, 0.03608066, 0.0459111],
            [-0.2611974, -0.02251576, -0.3226872],
        ],
    },
}


def average_at_pytorchs_steps(switch: int, period: int) -> syncalgos.Strategy:
    """Post-local SGD by PyTorch's clock."""
    late = syncalgos.every(syncalgos.average(), period, offset=(switch + 1) % period)
    early = syncalgos.until(syncalgos.sync_sgd(), switch)
    return syncalgos.chain(early, syncalgos.after(late, switch))


@pytest.mark.parametrize(
    ("strategy", "figures"),
    [
        (syncalgos.post_local_sgd(dense_steps=3, period=4), POST_LOCAL[3, 4]),
        (average_at_pytorchs_steps(4, 3), POST_LOCAL[4, 3]),
    ],
    ids=["clocks that agree", "another offset"],
)
def test_post_local_sgd_matches_pytorchs(strategy, figures):
    assert_params_at_steps(
        least_squares(strategy, optax.sgd(0.1, momentum=0.9), 12), figures
    )


# meta-pytorch/torchft 7eb7087, local_sgd.DiLoCo with a stub for its manager (all-reduce
# by gloo, and every commit succeeds), an outer SGD(lr=0.7, momentum=0.9, nesterov=True)
# for each of the fragments a and b, around AdamW(lr=0.1, weight_decay=0.1).
TORCHFT = {
    (4, 2, 1, 0.5): {
        2: [
            [-0.003260122, -0.3211411, -0.261793],
            [0.02095165, -0.6012458, -0.5313206],
        ],
        4: [[0.09422848, -0.3028279, -0.2610261], [0.1498459, -0.4380435, -0.3676972]],
        8: [[0.3441681, -0.165357, -0.1299261], [0.3272551, -0.2074997, -0.1731078]],
        12: [
            [0.2650102, -0.004513849, -0.02941452],
            [0.2579066, -0.05076154, -0.07431266],
        ],
    },
    (4, 2, 0, 0.0): {
        6: [[0.2667751, -0.253972, -0.171486], [0.2667751, -0.2169906, -0.2447167]],
        12: [[0.3033631, 0.1888033, 0.1176982], [0.3133963, 0.1888033, 0.1176982]],
    },
}


@pytest.mark.parametrize("settings", TORCHFT)
def test_streaming_diloco_matches_torchfts(settings):
    period, fragments, delay, alpha = settings
    strategy = syncalgos.streaming_diloco(
        period, fragments=fragments, delay=delay, alpha=alpha
    )
    params = least_squares(strategy, optax.adamw(0.1, weight_decay=0.1), 12)
    assert_params_at_steps(params, TORCHFT[settings])


# jkolehm/noloco 37d1a8a, SparseOptimizerC(local_group_size=2, number_of_local_steps=2,
# outer_lr=0.7, outer_momentum=0.5, lr=0.1), the second worker from twice the params.
NOLOCO = {
    2: [[0.07582279, -0.5820661, -0.5689418], [0.1181588, -0.7410169, -0.7083225]],
    4: [[0.1033002, -0.5607941, -0.579479], [0.06660899, -0.4230367, -0.4586825]],
    5: [[0.1764618, -0.5112118, -0.5093501], [0.1342891, -0.3365353, -0.4216402]],
    6: [[0.2090565, -0.4182587, -0.462418], [0.1585355, -0.2285774, -0.2960904]],
}


def test_noloco_matches_its_authors_code():
    """Two workers are each other's partners at all syncs."""
    params = least_squares(
        syncalgos.noloco(2, outer_lr=0.7, outer_momentum=0.5),
        optax.adam(0.1),
        6,
        (1, 2),
    )
    assert_params_at_steps(params, NOLOCO)
