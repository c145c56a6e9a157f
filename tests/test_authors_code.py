"""Published codes and ours, on equal inputs.

Their figures were printed, in float32, by the repositories and commits that stand over
them, run by PyTorch 2.13 in two processes that talk through gloo, on the same `wave`s.
"""

import jax
import jax.numpy as jnp
import numpy as np
from reducing import assert_close, run

from syncalgos import reducers

# They print seven digits, and sums of ours are in another order.
SAME = 1e-5


def wave(*shape, phase=0.0):
    """Numbers in -1 … 1 of no short period, the same in any library."""
    numbers = np.arange(int(np.prod(shape)))
    return np.sin(0.7 * numbers**2 + phase).reshape(shape).astype(np.float32)


def low_rank(first, **settings):
    """PowerSGD with feedback, of one matrix, from another's first Q."""
    plain = reducers.power_sgd(len(first[0]), min_rate=0, **settings)

    def init(params):
        is_matrix = [x.ndim == 2 for x in jax.tree.leaves(params)]
        return [jnp.float32(first) if matrix else () for matrix in is_matrix]

    return reducers.error_feedback(reducers.Reducer(plain.combine, init))


# epfml/powersgd f07be92, BasicPowerSGD(rank=2, num_iters_per_step=1): the gradient of
# the third step, and what is then left of that in the workers. It takes half an
# iteration at a call, P of Q and Q of P in turn: so it was called twice with each
# matrix, from `step_counter = 1`, and what the first call returned was dropped.
PACKAGE = [
    [0.09131989, -0.05467202, 0.5886921, -0.4057887],
    [-0.1934444, 0.2911357, -0.8763652, 0.4889015],
    [0.0993723, 0.1808824, 1.148806, -0.9497978],
    [0.09773604, -0.3280622, 0.06017, 0.13561],
    [-0.1387676, 0.6741242, 0.3550341, -0.6330264],
]
LEFT = [  # the last row of each worker
    [-0.02506936, -0.3380956, -0.5119244, 0.03847289],
    [-0.3095409, 0.05104411, 0.05930823, -0.1017998],
]


def test_power_sgd_matches_the_package_of_its_authors():
    grads = wave(3, 2, 5, 4)
    combined, _, state = run(low_rank(wave(4, 2, phase=1.0)), grads)
    assert_close(combined[-1], [PACKAGE, PACKAGE], SAME)
    assert_close(state.residual[-1, :, -1], LEFT, SAME)


# PyTorch 2.13, DistributedDataParallel with powerSGD_hook and PowerSGDState(None, 2,
# start_powerSGD_iter=2, min_compression_rate=0.9), which leaves the bias whole: the first
# Q, as its seed of 0 draws it, and the gradients of the fourth compressed step.
FIRST = [
    [-0.8103024, 0.4133995],
    [-1.277825, 0.330252],
    [0.3386462, -0.6434367],
    [-0.9755873, -0.9591677],
]
HOOK = [
    [-0.03886602, -0.2098156, -0.5142168, -0.06872918],
    [-0.01737454, -0.001510747, -0.3312458, -0.4333963],
    [0.04792624, 0.4330997, 0.4425437, -0.6761043],
    [0.05223013, 0.338242, 0.6292074, -0.1532139],
    [-0.03762896, -0.05305544, -0.662711, -0.7214054],
]
BIAS = [-0.6464887, 0.6481751, -0.1888586]


def test_power_sgd_matches_pytorchs_hook():
    """Its residuals hold what workers differ by: the same gradients come out."""
    grads = {"matrix": wave(6, 2, 5, 4)[2:], "bias": wave(6, 2, 3, phase=2.0)[2:]}
    combined, _, _ = run(low_rank(FIRST), grads)
    assert_close(combined["matrix"][-1], [HOOK, HOOK], SAME)
    assert_close(combined["bias"][-1], [BIAS, BIAS], SAME)
