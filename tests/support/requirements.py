"""The properties that each algorithm must have, as data: no test names an algorithm.

Most owe the same, so that a new algorithm is tested by existing. One that differs has a
row in OWED. They run for 2 · PERIOD local steps on params of the shapes SHAPES.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import optax

import syncalgos

PERIOD = 4
SHAPES = {"bias": (3,), "in": (5, 3), "out": (3, 1), "scale": ()}
SIZES = [math.prod(shape) for shape in SHAPES.values()]
PARAMS = 4 * sum(SIZES)  # bytes, in float32
ALL = tuple(range(2 * PERIOD))
NONE = ()


def ring(n, size):
    """Bytes that a worker of n sends of an all-reduced array."""
    return 2 * (n - 1) / n * size


def gathered(n, part):
    """Bytes that a worker of n sends of an array that all gather."""
    return (n - 1) * part


class Owed(NamedTuple):
    """The properties of an algorithm, run with the values below.

    Attributes:
        agree_after: the local steps, from 0, after which replicas are equal.
        send_steps: the local steps, from 0, in which anything is sent.
        expected_bytes: workers -> bytes that each sends in all.
        optimizer: the inner one, for an algorithm that means a certain kind.
        decided: for one that decides on what it sends by data, what at each local step:
            a row of as many booleans as it has decisions.
    """

    agree_after: tuple[int, ...] = (PERIOD - 1, 2 * PERIOD - 1)
    send_steps: tuple[int, ...] = (PERIOD - 1, 2 * PERIOD - 1)
    expected_bytes: Callable[[int], float] = lambda n: 2 * ring(n, PARAMS)
    optimizer: optax.GradientTransformation = optax.sgd(0.1, momentum=0.9)
    decided: tuple[tuple[bool, ...], ...] | None = None

    def decisions(self, steps: int) -> np.ndarray | None:
        """The `taken` of `communication` for so many steps."""
        if self.decided is None:
            return None
        return np.resize(self.decided, (steps, len(self.decided[0])))


def synchronous(step_bytes: Callable[[int], float]) -> Owed:
    """Owed by what combines gradients: it sends at every step, replicas stay equal."""
    return Owed(ALL, ALL, lambda n: 2 * PERIOD * step_bytes(n))


def voted(n: int) -> float:
    """Bytes of a vote on each leaf by its parts, and of one number."""
    return 2 * (n - 1) * sum(-(-size // n // 8) for size in SIZES) + ring(n, 4)


def peers(step_bytes: float) -> Owed:
    """Owed by what sends so many bytes to one peer at every step."""
    return Owed(NONE, ALL, lambda n: 2 * PERIOD * step_bytes * (n > 1))


def neighbors(n: int) -> int:
    """Workers to which each of n sends on a ring; of two, the other one alone."""
    return min(2, n - 1)


def on_a_ring(step_bytes: float) -> Owed:
    """Owed by what sends so many bytes to each neighbor on a ring at every step."""
    return Owed(NONE, ALL, lambda n: 2 * PERIOD * step_bytes * neighbors(n))


def in_groups(n: int) -> int:
    """Workers of a group, by default: N over its largest divisor up to its root."""
    return n // max(d for d in range(1, math.isqrt(n) + 1) if n % d == 0)


# For algorithms that move entries by the learning rate, whatever the gradient.
SMALL_STEPS = optax.sgd(0.003)

# Of the four leaves, at a density of 0.3: 1, 5, 1 and 1 entries.
CHOSEN = [1, 5, 1, 1]

OWED = {
    **dict.fromkeys(
        ("sync_sgd", "gpa", "ema_nesterov"), synchronous(lambda n: ring(n, PARAMS))
    ),
    # Synchronous until step 4.
    "post_local_sgd": Owed(
        (0, 1, 2, 3, 7), (0, 1, 2, 3, 7), lambda n: 5 * ring(n, PARAMS)
    ),
    # In groups after steps 2 and 6, all after 4 and 8.
    "hierarchical": Owed(
        send_steps=(1, 3, 5, 7),
        expected_bytes=lambda n: 2 * ring(n, PARAMS) + 2 * ring(in_groups(n), PARAMS),
    ),
    # A bound that a worker exceeds by every fourth step, where all vote by one number.
    "dynamic_averaging": Owed(
        expected_bytes=lambda n: 2 * ring(n, PARAMS + 4),
        decided=((False,),) * 3 + ((True,),),
    ),
    # Moments are counted with a replica that has them: see test_communication.py.
    "des_loc": Owed(optimizer=optax.adam(0.1)),
    # Four fragments, one a step.
    "streaming_diloco": Owed(NONE, ALL),
    "eager_diloco": Owed(NONE),
    # The pull of step 5 begins at the anchor, and ends there.
    "palsgd": Owed((3, 4, 7)),
    # And a norm of each leaf.
    "edit": Owed(
        expected_bytes=lambda n: 2 * (ring(n, PARAMS) + gathered(n, 4 * len(SIZES)))
    ),
    # Rank 1 of (5, 3) and (3, 1); vectors and scalars whole.
    "diloco_x": Owed(
        expected_bytes=lambda n: 2 * ring(n, 4 * ((5 + 3) + (3 + 1) + 3 + 1))
    ),
    "overlap_local_sgd": Owed(NONE),
    # Of equal speeds: all arrive together, and leave one after the other.
    "async_diloco": Owed(NONE, expected_bytes=lambda n: 2 * gathered(n, PARAMS)),
    "heloco": Owed(NONE, expected_bytes=lambda n: 2 * gathered(n, PARAMS)),
    "halos": Owed(NONE, expected_bytes=lambda n: 2 * gathered(n, PARAMS)),
    # Four fragments, one a step; of equal speeds all answer at once.
    "decoupled_diloco": Owed(NONE, ALL),
    "noloco": Owed(NONE, expected_bytes=lambda n: 2 * 2 * PARAMS * (n > 1)),
    "gasloc": Owed(NONE, expected_bytes=lambda n: 2 * PARAMS * neighbors(n)),
    "easgd": Owed(NONE),
    "gossip": peers(PARAMS),
    # An all-reduce instead, after steps 4 and 8.
    "gossip_pga": Owed(
        send_steps=ALL,
        expected_bytes=lambda n: 6 * PARAMS * (n > 1) + 2 * ring(n, PARAMS),
    ),
    "d2": on_a_ring(PARAMS),
    "gradient_tracking": on_a_ring(2 * PARAMS),
    "choco_sgd": on_a_ring(6 * sum(CHOSEN)),  # values and indices of 16 bits
    "push_sum": peers(PARAMS + 4),  # and the weight
    "qg_dsgdm": on_a_ring(PARAMS),
    "scaffold": Owed(expected_bytes=lambda n: 2 * ring(n, 2 * PARAMS)),
    "scaffnew": Owed((1, 4), (1, 4)),  # as the coin of seed 0 falls
    "sparta": Owed(NONE, ALL, lambda n: 2 * PERIOD * ring(n, 4 * sum(CHOSEN))),
    # 2 components of each leaf, value and index of 16 bits; the scalar as it is.
    "demo": synchronous(lambda n: gathered(n, 6 * (2 + 2 + 2)) + ring(n, 4)),
    # Indices of 12 bits and, but for single values, bins of 2 and a table, in bytes.
    "sparseloco": Owed(
        expected_bytes=lambda n: 2 * gathered(n, 3 * (2 + 4) + (8 + 2 + 4 * 4))
    ),
    # Values and indices of 16 bits.
    "pulseloco": Owed(expected_bytes=lambda n: 2 * gathered(n, 6 * sum(CHOSEN))),
    # At any rate: rank 2 of (5, 3), rank 1 of (3, 1); vectors and scalars whole.
    "powersgd": synchronous(lambda n: ring(n, 4 * (2 * (5 + 3) + (3 + 1) + 3 + 1))),
    # At half the rank: rank 2 of (5, 3), rank 1 of (3, 1); vectors and scalars whole.
    "dion": synchronous(lambda n: ring(n, 4 * (2 * (5 + 3) + (3 + 1) + 3 + 1))),
    # Values and indices of 16 bits.
    "topk_sgd": synchronous(lambda n: gathered(n, 6 * sum(CHOSEN))),
    # Of the two matrices 4 + 1 entries in two steps, 2 + 1 later; the others whole.
    "dgc": Owed(
        ALL,
        ALL,
        lambda n: gathered(n, 6 * (2 * 5 + 6 * 3)) + 2 * PERIOD * ring(n, 4 * (3 + 1)),
    ),
    # Values and indices of 16 bits.
    "ef21": synchronous(lambda n: gathered(n, 6 * sum(CHOSEN))),
    # A bit per entry in whole bytes, and a scale of each leaf.
    "sign_sgd": synchronous(lambda n: gathered(n, (1 + 2 + 1 + 1) + 4 * 4)),
    # A bit per entry of a worker's part, twice, and a number that is NaN or 0.
    "signum": synchronous(voted)._replace(optimizer=SMALL_STEPS),
    "distributed_lion": synchronous(voted)._replace(optimizer=SMALL_STEPS),
    # The gradients in the first steps, then twice a bit per entry of a worker's part,
    # and the part's scale.
    "one_bit_adam": Owed(
        ALL,
        ALL,
        lambda n: (
            PERIOD * ring(n, PARAMS)
            + PERIOD * 2 * (n - 1) * sum(-(-size // n // 8) + 4 for size in SIZES)
        ),
        SMALL_STEPS,
    ),
    # Gradients at steps 1, 2 and 4, and as above at the syncs after 1 to 4 and 8.
    "zero_one_adam": Owed(
        (0, 1, 2, 3, 7),
        (0, 1, 2, 3, 7),
        lambda n: (
            3 * ring(n, PARAMS)
            + 5 * 2 * (n - 1) * sum(-(-size // n // 8) + 4 for size in SIZES)
        ),
        SMALL_STEPS,
    ),
    # Twice: half a byte per entry of a worker's part, and the part's scale.
    "loco": synchronous(
        lambda n: 2 * (n - 1) * sum(-(-size // n // 2) + 4 for size in SIZES)
    ),
    # Twice: a byte per entry of a worker's part, and the part's scale.
    "quantized_sgd": synchronous(
        lambda n: 2 * (n - 1) * sum(-(-size // n) + 4 for size in SIZES)
    ),
}

# Values to run under, where a default will not do or is missing.
VALUES: dict[str, Any] = {
    "period": PERIOD,
    "learning_rate": 0.1,
    "inner_period": 2,
    "fraction": 0.5,
    "density": 0.3,
    "top_k": 2,
    "min_rate": 0.0,
    "bound": 1e-6,
    "slowest": 1.0,
    "first_period": 2 * PERIOD,
    "second_period": 2 * PERIOD,
    "reset_period": PERIOD,
}

ALGORITHM_VALUES = {
    ("post_local_sgd", "dense_steps"): PERIOD,
    ("one_bit_adam", "dense_steps"): PERIOD,
    ("zero_one_adam", "variance_steps"): PERIOD,
    ("zero_one_adam", "refreshes"): 1,
    ("zero_one_adam", "learning_rate"): 0.003,
    ("dgc", "dense_steps"): 2 * PERIOD,
    ("distributed_lion", "majority"): True,
    ("sparta", "period"): 1,  # it averages a little at every step
    ("diloco_x", "rank"): 1,  # 2 of (5, 3) is nearly all
    ("dion", "rank_fraction"): 0.5,
    ("dgc", "density"): 0.1,  # below that of its dense steps
    ("streaming_diloco", "cut"): "leaves",
    ("halos", "updates"): 1,
    ("decoupled_diloco", "quorum"): 4,
    ("qsr", "growth"): 0.05,  # too little to lengthen the first round
}

# Another legal value, where half of the first will not do.
OTHER_VALUES: dict[Any, Any] = {
    ("fedavg", "fraction"): 1.0,  # of 4 workers at least two
    ("loco", "bits"): 2,
    ("co2", "outer_momentum"): 0.5,
    ("halos", "regions"): 1,
    ("heloco", "aligned"): 0.9,
    "block_momentum": 0.3,
    "learning_rate": lambda step: 0.1 / (1 + step),
    "bound": 1e6,
    "buffer": 3,
    "early_momentum": 0.2,
    "arrival_weight": 1.0,
    "optimizer": optax.sgd(0.1, momentum=0.9),
    "topology": "ring",
    **{
        (name, "topology"): "complete"
        for name in ("d2", "gradient_tracking", "choco_sgd", "qg_dsgdm", "gasloc")
    },
    "reduce": "int4",
    "method": "yogi",
    "entry_clip": 0.01,
    "leaf_clip": 0.01,
    "decay": 0.5,
    "forgetting": 0.9,
    "growth": 0.3,
    "groups": 1,
    "hosts": 4,
    "bits": 4,
    "drop": 0.5,
    "alpha": 0.5,
    "global_share": 0.5,
    "delay": 1,
    "chunk": 1,
    "min_rate": 2.0,
    "cut": "bytes",
    "layered": lambda path, shape: int(path == "in"),
    "proximal": 1.0,
    "consensus": 0.3,
    "local_clip": 0.1,
    "eps": 0.1,
}

# What else is set where a parameter would else change nothing.
COMPANIONS: dict[tuple[str, str], dict[str, Any]] = {
    ("sync_sgd", "seed"): {"reduce": "int4"},
    ("diloco", "seed"): {"reduce": "int4"},
    ("muloco", "seed"): {"reduce": "int4"},
    ("muloco", "decay"): {"reduce": "int4"},
    ("streaming_diloco", "seed"): {"reduce": "int4"},
    ("streaming_diloco", "delay"): {"fragments": 2},
    ("streaming_diloco", "period"): {"fragments": 2},
    ("streaming_diloco", "layered"): {"cut": "layers"},
    ("powersgd", "seed"): {"rank": 1},
    ("push_sum", "seed"): {"drop": 0.5},
    ("sign_sgd", "seed"): {"majority": True},
    ("demo", "learning_rate"): {"sign": True},
    # Eight syncs, whose norms have a deviation from the third on.
    ("edit", "threshold"): {"period": 1, "trusted": 2},
    ("edit", "forgetting"): {"period": 1, "trusted": 2, "threshold": 0.5},
    ("edit", "trusted"): {"period": 1, "threshold": 0.5},
    # What is sent takes effect a round later: three rounds show more than two.
    ("overlap_local_sgd", "anchor_momentum"): {"period": 2},
    ("co2", "outer_momentum"): {"period": 2},
    ("co2", "penalty"): {"period": 2},
    ("async_diloco", "dynamic_steps"): {"slowest": 0.5},
    ("async_diloco", "optimizer"): {"slowest": 0.5},
    ("decoupled_diloco", "period"): {"fragments": 2},
    ("decoupled_diloco", "quorum"): {"slowest": 0.4, "grace": 0},
    ("decoupled_diloco", "grace"): {"slowest": 0.3, "quorum": 1},
    ("decoupled_diloco", "optimizer"): {"slowest": 0.5},
    ("heloco", "turn"): {"aligned": 0.9},
    ("heloco", "dynamic_steps"): {"slowest": 0.5},
    ("heloco", "optimizer"): {"slowest": 0.5},
    ("halos", "optimizer"): {"slowest": 0.5},
}


def owed(name: str) -> Owed:
    """The algorithm's row."""
    return OWED.get(name, Owed())


def parameters(name: str) -> dict[str, Any]:
    """An algorithm's parameters and their values in these tests, the axis left out."""
    signature = inspect.signature(syncalgos.ALGORITHMS[name])
    defaults = {n: p.default for n, p in signature.parameters.items() if n != "axis"}
    return {
        n: ALGORITHM_VALUES.get((name, n), VALUES.get(n, default))
        for n, default in defaults.items()
    }


def other_value(name: str, parameter: str) -> Any:
    """A legal value that must change the result."""
    value = parameters(name)[parameter]
    for key in ((name, parameter), parameter):
        if key in OTHER_VALUES:
            return OTHER_VALUES[key]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value // 2 if value > 1 else value + 1
    return value / 2


def make(name: str, **changes: Any) -> syncalgos.Strategy:
    """The algorithm with a short period."""
    return syncalgos.ALGORITHMS[name](**{**parameters(name), **changes})
