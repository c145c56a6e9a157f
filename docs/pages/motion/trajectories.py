"""Animations of four workers on a loss of two parameters, one for each algorithm.

python -m pages.motion.trajectories --out DIR [NAME ...] writes NAME.svg, with docs/ on
the path of Python. There are always four workers, and the period is 8 steps.
"""

import argparse
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

import syncalgos
from pages.motion import landscape
from pages.motion.drawing import svg as svg
from pages.motion.film import Recorded
from syncalgos import Replica, Strategy, checks
from syncalgos.algorithms import ALGORITHMS

STEPS = 96
PERIOD = 8
RATE = 0.1
AXIS = "workers"


class Setup(NamedTuple):
    """A way to train by an algorithm, where it is not by SGD with its defaults.

    Attributes:
        arguments: of the algorithm's factory, besides its period.
        optimizer: rate -> the inner one.
        rate: the learning rate, or the highest one.
        final_share: the last rate as a share of the first, with a cosine between.
        leaves: of params, cut between columns.
        shape: of params, a matrix. More than two entries have the two parameters as
            coordinates: SGD goes the same way, and compression has more to leave out.
    """

    arguments: Mapping[str, Any] = MappingProxyType({})
    optimizer: Callable[..., optax.GradientTransformation] = optax.sgd
    rate: float = RATE
    final_share: float = 1.0
    leaves: int = 1
    shape: tuple[int, int] = (1, 2)


# Of two entries one is sent: the least that compression can leave out.
HALF = {"density": 0.5}
SETUPS = {
    "post_local_sgd": Setup({"dense_steps": 32}),
    "hierarchical": Setup({"inner_period": 4, "groups": 2}),
    "fedavg": Setup({"fraction": 0.5}),
    "fedprox": Setup({"proximal": 0.5}),
    "qsr": Setup({"period": 4, "growth": 0.17}, final_share=0.3),
    "des_loc": Setup(optimizer=optax.adam, rate=0.12, final_share=0.1),
    "dynamic_averaging": Setup({"bound": 0.15}),
    "bmuf": Setup({"block_momentum": 0.5}),
    "fedopt": Setup({"outer_lr": 0.15, "b1": 0.5, "tau": 0.1}),
    "diloco": Setup({"outer_momentum": 0.6}),
    "pulseloco": Setup({"outer_momentum": 0.6}),
    "muloco": Setup({"outer_momentum": 0.5}, optax.contrib.muon, 0.06, 0.1),
    "edit": Setup({"outer_momentum": 0.6}),
    "streaming_diloco": Setup({"outer_momentum": 0.6, "fragments": 2}, leaves=2),
    "eager_diloco": Setup({"outer_momentum": 0.5}),
    "palsgd": Setup({"outer_momentum": 0.6}),
    "async_diloco": Setup({"outer_momentum": 0.5}),
    "co2": Setup({"outer_momentum": 0.3}),
    # Gossip of gradients is stable at low rates alone; momentum makes up for it.
    "gradient_tracking": Setup({}, partial(optax.sgd, momentum=0.8), 0.01),
    "choco_sgd": Setup({"density": 0.5, "consensus": 0.5}),
    "sparta": Setup(HALF),
    "demo": Setup({"decay": 0.9, "chunk": 2, "top_k": 1}, rate=0.06),
    "sparseloco": Setup({"density": 0.5, "chunk": 2}),
    "powersgd": Setup({"rank": 1}, shape=(6, 6)),
    "dion": Setup(rate=0.06, final_share=0.1, shape=(6, 6)),
    "topk_sgd": Setup(HALF),
    "dgc": Setup({"density": 0.5, "local_momentum": 0.5, "dense_steps": 0}, rate=0.08),
    "ef21": Setup({"density": 0.5, "local_momentum": 0.5}),
    "signum": Setup(rate=0.06, final_share=0.1),
    "distributed_lion": Setup(rate=0.06, final_share=0.1),
    "one_bit_adam": Setup({"dense_steps": 32}, rate=0.06, final_share=0.1),
    "quantized_sgd": Setup({"bits": 2}, shape=(6, 6)),
    "loco": Setup({"bits": 2}, shape=(6, 6)),
}


def record_trajectories(name: str, steps: int = STEPS, seed: int = 0) -> Recorded:
    """Trains two parameters on four workers, and records where they go.

    Args:
        name: of an algorithm of the registry.
        steps: local steps.
        seed: of the noise.

    Returns:
        The places of the workers and of the center, and the steps of the syncs.
    """
    setup = SETUPS.get(checks.one_of("algorithm", name, ALGORITHMS), Setup())
    rate = setup.rate
    if setup.final_share < 1:
        rate = optax.cosine_decay_schedule(rate, steps, setup.final_share)
    strategy = _strategy(name, setup, rate)
    optimizer = setup.optimizer(rate)
    basis = _basis(setup.shape)
    replica = _replica(setup, basis, optimizer)
    run = jax.jit(
        jax.vmap(partial(_train, strategy, optimizer, basis), (None, 0), axis_name=AXIS)
    )
    data = landscape.examples(steps, seed)
    recording = jax.tree.map(np.asarray, run(replica, data))
    decided = [
        decision[0] for decision in recording.decided
    ]  # identical on all workers
    ledger = syncalgos.communication(
        strategy,
        replica,
        workers=len(data),
        steps=steps,
        taken=np.stack(decided, axis=1) if decided else None,
    )
    described_settings = {**setup.arguments, "learning rate": setup.rate}
    return Recorded(
        name,
        _started(recording.synced.swapaxes(0, 1)),
        recording.local.swapaxes(0, 1),
        recording.slopes.swapaxes(0, 1),
        _started(recording.center[0]),
        np.diff(ledger.per_step, prepend=0.0) > 0,
        ", ".join(f"{k.replace('_', ' ')} {x}" for k, x in described_settings.items()),
    )


class TrajectoryRecording(NamedTuple):
    """One worker's way, with leading (steps, ...): see `Recorded`.

    Attributes:
        slopes, local, synced, center: points, (steps, 2); synced: with the sync.
        decided: whether it was decided to sync, (steps,) for each such decision.
    """

    slopes: Any
    local: Any
    synced: Any
    center: Any
    decided: list[Any]


def _train(
    strategy: Strategy,
    optimizer: optax.GradientTransformation,
    basis: np.ndarray,
    replica: Replica,
    examples: jax.Array,
) -> TrajectoryRecording:
    """Trains one worker on its examples, (steps, 2): the loop of docs/own-loop.md."""

    def point(params):
        return basis @ jnp.concatenate(jax.tree.leaves(params), axis=1).ravel()

    def loss(params, example):
        u, v = point(params)
        return landscape.valley(u, v) + point(params) @ example

    def local_step(carry, example):
        replica, state, step = carry
        slopes = jax.grad(loss)(replica.params, example)
        grads, state = strategy.reduce(slopes, replica, state, step)
        updates, opt_state = optimizer.update(grads, replica.opt_state, replica.params)
        params = optax.apply_updates(replica.params, updates)
        synced, state = strategy.sync(Replica(params, opt_state), state, step)
        recording = TrajectoryRecording(
            point(slopes),
            point(params),
            point(synced.params),
            point(strategy.center(synced.params, state)),
            [*syncalgos.sync_metrics(state, step).get("decided", ())],
        )
        return (synced, state, step + 1), recording

    carry = replica, strategy.init(replica.params), jnp.int32(0)
    return jax.lax.scan(local_step, carry, examples)[1]


def _basis(shape: tuple[int, int]) -> np.ndarray:
    """Returns orthogonal unit vectors, from params to the point, (2, entries)."""
    entries = shape[0] * shape[1]
    if entries == 2:
        return np.eye(2, dtype=np.float32)
    drawn = np.random.default_rng(0).normal(size=(entries, 2))
    return np.linalg.qr(drawn).Q.T.astype(np.float32)


def _replica(
    setup: Setup, basis: np.ndarray, optimizer: optax.GradientTransformation
) -> Replica:
    """Returns a worker at the start."""
    start = (landscape.START.astype(np.float32) @ basis).reshape(setup.shape)
    leaves = np.split(start, setup.leaves, axis=1)
    params = {str(i): jnp.asarray(leaf) for i, leaf in enumerate(leaves)}
    return Replica(params, optimizer.init(params))


def _strategy(name: str, setup: Setup, rate: Any) -> Strategy:
    """Calls the factory with its own arguments and those that most take."""
    factory = ALGORITHMS[name]
    parameters = inspect.signature(factory).parameters
    offered = {"period": PERIOD, "learning_rate": rate, "axis": AXIS}
    # At periods of one step nothing local is left to see; sparta's is one by default.
    common = {
        key: value
        for key, value in offered.items()
        if key in parameters and (key != "period" or parameters[key].default != 1)
    }
    return factory(**{**common, **setup.arguments})


def _started(places: np.ndarray) -> np.ndarray:
    """Returns places with the start before them."""
    start = np.broadcast_to(landscape.START.astype(np.float32), places[:1].shape)
    return np.concatenate([start, places])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N")
    flags = parser.parse_args(arguments)
    try:
        names = [checks.one_of("algorithm", x, ALGORITHMS) for x in flags.names]
    except ValueError as error:
        parser.error(str(error))
    flags.out.mkdir(parents=True, exist_ok=True)
    for name in names or ALGORITHMS:
        picture = svg(record_trajectories(name, flags.steps))
        (flags.out / f"{name}.svg").write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main()
