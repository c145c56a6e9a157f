# pyright: strict, reportMissingTypeStubs=false
"""Every public name, used as the docs use it, for a strict type checker."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

import syncalgos as sa
from syncalgos.writing import collectives

# Of each kind of argument one.
STRATEGIES: list[sa.Strategy] = [
    sa.sync_sgd(reduce="int8"),
    sa.post_local_sgd(dense_steps=100, period=16),
    sa.post_local_sgd(100, 16),
    sa.slowmo(16, 0.5, 1.0, optax.constant_schedule(0.1)),
    sa.scaffold(16, 0.1),
    sa.streaming_diloco(16, 2, 0.7, 0.9, 1, 0.5),
    sa.hierarchical(16, inner_period=4, groups=2),
    sa.fedavg(16, fraction=0.5),
    sa.qsr(4, growth=0.2, learning_rate=optax.constant_schedule(0.1)),
    sa.des_loc(16, first_period=48),
    sa.fedopt(16, method="yogi", b1=0.9),
    sa.co2(16, outer_momentum=0.3, entry_clip=1.0),
    sa.diloco(16, reduce=sa.reducers.error_feedback(sa.reducers.top_k(0.01))),
    sa.streaming_diloco(16, fragments=2, cut="layers"),
    sa.async_diloco(16, slowest=0.25, optimizer=optax.sgd(0.1)),
    sa.noloco(16, consensus=0.6),
    sa.gossip(topology="ring"),
    sa.gossip(topology=sa.graph([(0, 1), (1, 2)], workers=3).weights),
    sa.gradient_tracking(axis="workers"),
    sa.powersgd(2),
    sa.topk_sgd(density=0.1),
    sa.dgc(density=0.01, dense_steps=0),
    sa.distributed_lion(b1=0.9, b2=0.98),
    sa.loco(bits=4, beta=0.9),
]
BY_NAME: sa.Strategy = sa.ALGORITHMS["diloco"](period=8)


def vote(replica: sa.Replica, state: Any, step: jax.Array) -> jax.Array:
    return replica.loss > 1.0


def rounds(step: Any) -> Any:
    return jnp.where(step < 1000, 16, 32)


def odd(step: Any) -> Any:
    return step % 2 == 1


MEAN = collectives.mean
INNER_OPTIMIZER = optax.sgd(0.1, momentum=0.9)
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)
COMBINED: list[sa.Strategy] = [
    sa.every(sa.chain(sa.average(), sa.average("opt_state")), 16, offset=4),
    sa.every(sa.average("params", sa.reducers.median), rounds),
    sa.when(sa.average(), odd),
    sa.chain(sa.until(sa.sync_sgd(), 100), sa.after(sa.bmuf(16), 100)),
    sa.at_end(sa.diloco(16), 100),
    sa.every(sa.decided(sa.average()._replace(sees_loss=True), vote), 16),
    sa.delayed(sa.every(sa.outer_step(OUTER, "int4"), 64), 8, arrival="add"),
    sa.masked(sa.diloco(64), {"w": True, "b": False}),
    sa.ema(sa.bmuf(16), decay=0.999),
    sa.measured(sa.bmuf(16), layered={"w": 1}, ends=odd),
    sa.participating(sa.bmuf(16), sa.sampled(0.5, seed=1), stale=True),
    sa.paced(sa.model_averaging(16), [16, 8]),
    sa.at_syncs(sa.model_averaging(16), sa.reset(INNER_OPTIMIZER)),
    sa.reduce_with(
        sa.reducers.error_feedback(sa.reducers.quantized(4)), axis=sa.WORKERS
    ),
]


def leaning(keep: float = 0.5) -> sa.Strategy:
    """A strategy by hand, with declarations."""

    def init(params: Any) -> jax.Array:
        return jnp.float32(jnp.inf)

    def leaf(param: jax.Array, mean: jax.Array) -> jax.Array:
        return keep * param + (1 - keep) * mean

    def acts(step: jax.Array) -> jax.Array:
        return step >= 0

    def sync(
        replica: sa.Replica, state: Any, step: jax.Array
    ) -> tuple[sa.Replica, Any]:
        params = jax.tree.map(leaf, replica.params, sa.collectives.mean(replica.params))
        return replica._replace(params=params), replica.loss

    return sa.Strategy(
        init,
        sync=sync,
        center=sa.MeanCenter(sa.WORKERS),
        acts=acts,
        sees_loss=True,
        axis=sa.WORKERS,
        late=0,
        unit_steps=False,
        own_momentum=False,
    )


def mean_of_grads(
    grads: Any, replica: sa.Replica, state: Any, step: jax.Array
) -> tuple[Any, Any]:
    return sa.collectives.mean(grads), state


MEANS = sa.Strategy(reduce=sa.MeanOfGrads(mean_of_grads))


def plain(params: Any, batch: Any) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def full(
    params: Any, buffers: Any, batch: Any, key: jax.Array
) -> tuple[jax.Array, tuple[Any, dict[str, Any]]]:
    loss = plain(params, batch)
    return loss, (buffers, {"norm": jnp.sqrt(loss)})


def values(
    params: Any, buffers: Any, batch: Any, key: jax.Array
) -> tuple[dict[str, jax.Array], Any]:
    return {"loss": (batch @ params["w"]) ** 2}, buffers


def of_table(params: Any, ids: jax.Array) -> jax.Array:
    return jnp.mean(sa.lookup(params["table"], ids))


LOSSES = plain, full, sa.per_example(values), sa.stateless(plain)
PARAMS = {"w": np.zeros(4, np.float32)}


def trained() -> tuple[sa.Replica, sa.Communication]:
    """Trains for two steps."""
    trainer = sa.DataParallel(plain, optax.sgd(0.1), sa.every(leaning(), 2), workers=2)
    state: sa.TrainState = trainer.init(PARAMS, seed=1)
    batches = np.ones((2, 4, 4), np.float32)
    state, metrics = trainer.run(state, batches)
    assert metrics["loss"].shape == trainer.evaluate(state, batches)["loss"].shape
    assert trainer.divergence(state) >= 0
    state = trainer.from_host(trainer.to_host(state))
    state, _ = trainer.run(state, np.zeros((2, 4), np.int32), trainer.place(batches[0]))
    return trainer.center(state), trainer.communication(state, steps=2, workers=8)


def trainers() -> list[sa.DataParallel]:
    """Makes trainers, without training."""
    placement = sa.Placement(
        mesh={"fsdp": 1}, shardings={"w": PartitionSpec("fsdp")}, batch_axes=()
    )
    trainers_of_losses = [
        sa.DataParallel(loss, INNER_OPTIMIZER, sa.bmuf(16), workers=2)
        for loss in LOSSES
    ]
    return [
        *trainers_of_losses,
        sa.DataParallel(
            full,
            INNER_OPTIMIZER,
            sa.diloco(16),
            workers=2,
            eval_loss=plain,
            accumulate=2,
            each_worker=True,
            placement=placement,
        ),
        sa.DataParallel(
            of_table,
            INNER_OPTIMIZER,
            sa.bmuf(16),
            workers=2,
            backend="vmap",
            tables={"table": True},
            placement=sa.Placement(lanes=2, lane_form="vectorized", devices=[0]),
        ),
    ]


def count_bytes() -> list[float]:
    """Counts bytes, with and without a decision."""
    decided = sa.decided(sa.average()._replace(sees_loss=True), vote)
    decisions = np.array([[True], [False]])
    counts = [
        sa.communication(sa.diloco(16), PARAMS, workers=8, steps=32),
        sa.communication(decided, PARAMS, workers=8, steps=2, taken=decisions),
    ]
    options: dict[str, Any] = {"workers": 8, "step_seconds": 0.1, "network": "dsl"}
    planned: sa.Plan = sa.plan(sa.diloco(16), PARAMS, **options)
    return [*(count.bytes_per_worker for count in counts), planned.bytes]


def moved(metrics: dict[str, Any]) -> dict[str, jax.Array]:
    """Names the cosines that `measured` found."""
    figures: sa.Figures = metrics["measured"]
    assert sa.sync_metrics((), 0) == {}
    return dict(zip(sa.parts_of(PARAMS), figures.cosine.T, strict=True))


def before_it_runs() -> sa.ProgramSends:
    """Lowers a program, and compiles all that a training needs."""
    trainer = sa.DataParallel(
        plain, INNER_OPTIMIZER, sa.bmuf(16), workers=2, backend="shard_map"
    )
    batches = np.ones((2, 4, 4), np.float32)
    lowered: sa.Lowered = trainer.lower(PARAMS, batches)
    state = trainer.init(PARAMS)
    try:
        trainer.compile(state, (batches,), (batches,))
    except sa.LaneFormError:
        raise AssertionError from None
    assert trainer.run_program is not None and trainer.shardings(PARAMS) is None
    assert not isinstance(sa.HeldPart.of(state.step), sa.HeldPart)
    assert sa.ALGORITHMS[sa.ALIASES["ddp"]] is sa.sync_sgd
    return trainer.program_sends(lowered.state)


def described() -> list[int]:
    """Asks when a strategy acts, and what its center includes."""
    description: sa.Description = sa.describe(sa.chain(*STRATEGIES[:2]), workers=8)
    assert description.combines_grads and description.members["sync_sgd"].period == 1
    return [*description.acting_steps(8), *description.included_steps(8)]


def lengthened() -> float | None:
    """Measures how much BMUF lengthens steps."""
    result: sa.EffectiveRate = sa.effective_rate(sa.bmuf(4), INNER_OPTIMIZER, workers=2)
    return result.gain


def in_a_stack() -> Any:
    """Takes a step of a strategy of stacked replicas."""
    strategy = sa.stacked(sa.easgd(1, axis="replica"))
    params = {"w": np.ones((2, 4), np.float32)}
    replica = sa.Replica(params)
    state = strategy.init(params)
    _, state = strategy.reduce(params, replica, state, 0)
    replica, state = strategy.sync(replica, state, 0)
    return strategy.center(replica.params, state)


class Alone:
    """The transport of a single process."""

    rank = 0
    size = 1

    def all_gather(self, arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
        return [x[None] for x in arrays]

    def all_reduce(self, arrays: list[NDArray[Any]]) -> list[NDArray[Any]]:
        return arrays


def among_peers() -> sa.Replica:
    """Averages over a process group of one process."""
    transport: sa.Transport = Alone()
    peers = sa.Peers(transport)
    strategy = sa.model_averaging(1, axis=peers)
    replica = sa.Replica(PARAMS)
    state = strategy.init(PARAMS)
    try:
        replica, _ = peers.run(strategy.sync, replica, state, 0)
    except sa.TransportError:
        raise AssertionError from None
    return replica


def alone() -> Any:
    """Takes a step of a strategy as an optimizer."""
    strategy = sa.lookahead(5)
    optimizer = sa.as_optimizer(strategy, optax.adam(0.1))
    state = optimizer.init(PARAMS)
    updates, state = optimizer.update(PARAMS, state, PARAMS)
    return sa.center_of(strategy, state, optax.apply_updates(PARAMS, updates))
