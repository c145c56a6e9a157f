"""Refusals of the engine: a row of REFUSED is a call and words of its one line."""

import functools
import warnings
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx
from support.problems import two_tables
from support.problems.linear import (
    BATCHES,
    DATA,
    ROWS,
    X,
    Y,
    make_params,
    make_trainer,
    plain_loss,
    plain_trainer,
)

import syncalgos as sa
from syncalgos import checks
from syncalgos._engine.state import waits_untrained

PARAMS = make_params()


@functools.cache
def plain_state():
    """A state that those may take who refuse it, or what comes with it."""
    return plain_trainer().init(PARAMS)


def make_trainer_call(strategy=None, **options):
    """Makes a trainer."""
    return lambda: make_trainer(strategy, **options)


def started(
    params=PARAMS, buffers=(), *, hyperparams=None, make=None, seed=0, **options
):
    """Makes the first state: what is refused is refused before it is compiled."""

    def call():
        trainer = (make or make_trainer)(**options)
        try:
            trainer.init(params, buffers, seed, hyperparams)
        finally:
            assert trainer.compile_seconds == 0

    return call


def ran(batches=BATCHES, buffers=(), **options):
    """Takes local steps."""

    def call():
        trainer = make_trainer(**options)
        state = plain_state()
        if buffers or options.keys() & {"strategy", "backend"}:
            state = trainer.init(PARAMS, buffers)
        trainer.run(state, batches)

    return call


def losing(loss, batches=BATCHES, buffers=(), **options):
    """Takes local steps by another loss."""
    return ran(batches, buffers, loss=loss, **options)


def usual(use):
    """Uses the usual trainer and its first state."""
    return lambda: use(plain_trainer(), plain_state())


SGD = optax.sgd(0.05, momentum=0.9)


def make_data_parallel(optimizer, strategy):
    return sa.DataParallel(plain_loss, optimizer, strategy, workers=4)


def other(use, strategy, optimizer=SGD):
    """Uses another trainer, with the state of the usual one."""
    return lambda: use(make_data_parallel(optimizer, strategy), plain_state())


def start_with_optimizer(optimizer, strategy=None):
    """Starts with another inner optimizer."""
    strategy = strategy or sa.sync_sgd()
    return started(make=lambda: make_data_parallel(optimizer, strategy))


OF_LAYOUTS = [
    (
        make_trainer_call(workers=0),
        "workers must be a whole number of at least 1, got 0",
    ),
    (
        make_trainer_call(workers=2.5),
        "workers must be a whole number of at least 1, got 2.5",
    ),
    (make_trainer_call(backend="pmpa"), "unknown backend 'pmpa'; did you mean 'pmap'"),
    (make_trainer_call(devices=[5]), "device 5 does not exist"),
    (
        make_trainer_call(devices=[-1]),
        "a device must be a whole number of at least 0, got -1",
    ),
    (make_trainer_call(devices=[0, 0]), "devices must be distinct"),
    (make_trainer_call(devices=[]), "at least one"),
    (
        make_trainer_call(devices=2),
        "devices must be a list of indices or devices, got 2",
    ),
    (make_trainer_call(devices=[0, 1, 2]), "4 workers do not divide over 3 devices"),
    (
        make_trainer_call(backend="vmap", devices=[0, 1]),
        "'vmap' runs on one device, got 2",
    ),
    (make_trainer_call(workers=6, lanes=4), "lanes must divide the 6 workers, got 4"),
    (
        make_trainer_call(workers=6, lanes=1),
        "6 workers in 1 lanes need 6 .* workers or more lanes",
    ),
    (
        make_trainer_call(workers=4, lanes=1, mesh={"fsdp": 2}),
        r"in 1 lanes of 2 devices \(fsdp 2\) need 8 .* more lanes or a smaller mesh",
    ),
    (
        make_trainer_call(workers=6, lanes=3, devices=[0]),
        "6 workers on 1 .* lanes=6, got 3",
    ),
    (make_trainer_call(lanes=0), "lanes must be .*at least 1"),
    (make_trainer_call(lane_form="merge"), "lane_form.*merged"),
    (
        make_trainer_call(accumulate=1.5),
        "accumulate must be a whole number of at least 1, got 1.5",
    ),
]


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


RNGS = nnx.Rngs(0)
LINEAR = nnx.Linear(6, 1, rngs=RNGS)
NORMED = nnx.state(Normed(RNGS), nnx.Any(nnx.Param, nnx.BatchStat))
SEQUENTIAL = nnx.Sequential(LINEAR, nnx.BatchNorm(1, rngs=RNGS))
OF_LINEN = {"params": PARAMS, "batch_stats": {"norm": np.zeros(1, np.float32)}}
MLP = eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))
STEP = r"^params\['layers'\]\[1\]\['step'\] is.* {}.*belongs in buffers"
UNTYPED = r"buffers\['rng'\] is uint32\[2\].*jax\.random\.wrap_key_data"


def with_step(leaf):
    return started({"layers": [{"w": np.zeros(3)}, {"step": leaf}]})


class Tensor:
    """An array of another library."""

    shape = (12, 24)
    dtype = "torch.float32"
    __module__ = "torch"


TENSOR = "is a torch.Tensor, not an array of NumPy or jax"
IDS = np.full((12, 24), 7_000_000_001)
TOO_WIDE = "holds 7000000001, which int32 cannot hold"
OF_PARAMS = [
    (started({"w": Tensor()}), rf"params\['w'\] {TENSOR}"),
    (started(buffers={"n": Tensor()}), rf"buffers\['n'\] {TENSOR}"),
    (started(buffers={"n": IDS}), rf"buffers\['n'\] {TOO_WIDE}"),
    (started(seed=2**32), "seed must be below 2.*31, got 4294967296"),
    (started(seed=-1), "seed must be a whole number of at least 0, got -1"),
    (with_step(np.int32(3)), STEP.format("of dtype int32")),
    (with_step("text"), STEP.format("str")),
    (started({"w": 1.5}), r"params\['w'\] is float.*asarray\(1\.5\)$"),
    (started(Normed), r"^params is .* an object of this class, Normed\(…\)$"),
    (started({}), "params hold no arrays"),
    (started(buffers={"rng": jax.random.PRNGKey(0)}), UNTYPED),
    (started(NORMED), r"params\['norm'\]\['mean'\] is a BatchStat, .* trained: split"),
    (started(SEQUENTIAL), r"BatchStat, .* trained: .* by nnx.split\(model, nnx.Par"),
    (started(OF_LINEN), r"'\] is not trained: pass variables.pop\('params'\) as"),
    (started(MLP), r"params\.activation is .* eqx\.partition\("),
    (started(nnx.Dropout(0.5, rngs=RNGS)), r"\.count.* nnx\.split\(model, nnx\.Param"),
]


SAM = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))
SCHEDULE_FREE = optax.contrib.schedule_free_sgd(0.1)
BACKTRACKING = optax.scale_by_backtracking_linesearch(9)
PLATEAU = optax.chain(SGD, optax.contrib.reduce_on_plateau())
SEARCHES = "^optimizer: a line search needs the loss at other params"
EVERY_OTHER = optax.chain(optax.apply_every(2), SGD)
IF_FINITE = optax.apply_if_finite(SGD, 3)
FALLS = optax.linear_schedule(0.1, 0.0, 9)
RATED = sa.every(sa.gpa(), 2)._replace(learning_rate=1)
ZERO_ONE = sa.zero_one_adam(learning_rate=0.1)
NOISY = optax.noisy_sgd(0.1, key=0)
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)
MASKED_CHAIN = sa.chain(
    sa.masked(sa.sync_sgd(), {"w": True, "b": False}),
    sa.masked(sa.model_averaging(4), {"w": False, "b": True}),
)


def beside_tables(optimizer, strategy=None):
    """Starts with a table sharded over the workers."""
    params = {"rest": jnp.ones(3), "table": jnp.ones((8, 3))}
    tables = {"rest": False, "table": True}

    def make():
        strategy_ = strategy or sa.sync_sgd()
        return sa.DataParallel(
            lambda p, batch: 0.0, optimizer, strategy_, workers=4, tables=tables
        )

    return started(params, make=make)


MIXES = r"^optimizer: the step of params\['{}'\], .* same on all workers, depends on le"
DRAWS = "^optimizer: its state holds a random key, which must be the same"
OF_OPTIMIZERS = [
    (beside_tables(CLIPPED), MIXES.format("rest")),
    (beside_tables(CLIPPED, sa.bmuf(4)), MIXES.format("rest")),
    (beside_tables(IF_FINITE), MIXES.format("rest")),
    (start_with_optimizer(CLIPPED, MASKED_CHAIN), MIXES.format("w")),
    (beside_tables(NOISY), DRAWS),
    (start_with_optimizer(NOISY, MASKED_CHAIN), DRAWS),
    (start_with_optimizer(NOISY, sa.post_local_sgd(dense_steps=8, period=4)), DRAWS),
    (make_trainer_call(sa.bmuf), r"expected a Strategy, .*call it: bmuf\(\)"),
    (make_trainer_call("bmuf"), r"got 'bmuf' \(.* is an object: syncalgos.bmuf\(\)\)"),
    (make_trainer_call(SGD), "an optimizer. check the order of the"),
    (
        start_with_optimizer(optax.sgd),
        r"must be an optax optimizer, got .*\(call it: sgd\(…\)\)$",
    ),
    (
        start_with_optimizer(optax.linear_schedule(1, 0, 9)),
        r"\(a schedule is .*sgd\(schedule\)\)$",
    ),
    (start_with_optimizer("sgd"), r"\(an optimizer is an object: optax.sgd\(…\)\)$"),
    (
        start_with_optimizer(nnx.Optimizer(LINEAR, SGD, wrt=nnx.Param)),
        r".{,60} \(pass its .tx\)$",
    ),
    (
        start_with_optimizer(SCHEDULE_FREE),
        "^optimizer: schedule_free evaluates another model",
    ),
    (start_with_optimizer(optax.apply_if_finite(SCHEDULE_FREE, 3)), "docs/own-loop.md"),
    (
        start_with_optimizer(optax.lookahead(SGD, 5, 0.5)),
        r"with .* syncalgos.lookahead\(\)",
    ),
    (start_with_optimizer(optax.lbfgs()), SEARCHES),
    (start_with_optimizer(optax.chain(SGD, BACKTRACKING)), SEARCHES),
    (start_with_optimizer(SAM), "sam moves params to"),
    (start_with_optimizer(optax.contrib.sophia(0.1)), "Hessian needs the loss"),
    # One of unlike data would lower its rate for good while others keep theirs.
    (
        start_with_optimizer(PLATEAU, sa.bmuf(4)),
        "would differ between workers: use a sched",
    ),
    (
        start_with_optimizer(optax.MultiSteps(SGD, 2), sa.slowmo(4, learning_rate=0.1)),
        "MultiSteps do",
    ),
    (start_with_optimizer(EVERY_OTHER, RATED), "apply_every"),
    (start_with_optimizer(IF_FINITE, sa.qsr(learning_rate=FALLS)), "if_finite doe"),
    (start_with_optimizer(optax.MultiSteps(SGD, 2), ZERO_ONE), "weight decay"),
    (
        start_with_optimizer(
            optax.chain(optax.add_decayed_weights(0.5), SGD), ZERO_ONE
        ),
        "weight decay",
    ),
    (
        start_with_optimizer(
            optax.chain(optax.clip_by_global_norm(9.0), SGD), ZERO_ONE
        ),
        "clipping",
    ),
    (
        start_with_optimizer(
            optax.sgd(0.1, 0.9), sa.chain(ZERO_ONE, sa.ema(sa.gpa(), 0.5))
        ),
        "momentum",
    ),
    (start_with_optimizer(optax.sgd(0.2), sa.at_end(ZERO_ONE, 9)), "another rate"),
    (
        start_with_optimizer(
            optax.sgd(FALLS), sa.chain(sa.scaffold(learning_rate=0.2), sa.average())
        ),
        "it steps by a learning rate of 0.1 at local step 0, but .* is 0.2: give both",
    ),
]

TEN = {"x": X[ROWS[0, :10]]}
Y_LEADS = r"batches\['y'\] has leading axes"


def by_rows(rows):
    return usual(lambda trainer, state: trainer.run(state, rows, trainer.place(DATA)))


def stepped(batch):
    return usual(lambda trainer, state: trainer.step(state, batch))


def evaluated(batches, eval_loss=None):
    return lambda: make_trainer(eval_loss=eval_loss).evaluate(plain_state(), batches)


WEIGHT = "microbatch_weight"


def counting(name):
    """A loss with a metric that is no mean of examples."""

    def loss(params, buffers, batch, key):
        hits = batch["x"][:, 0] > 0
        metrics = {name: hits if name == "hits" else hits.sum()}
        return plain_loss(params, batch), (buffers, metrics)

    return loss


ELEVEN = jax.tree.map(lambda x: x[:, :11], BATCHES)
OF_BATCHES = [
    (ran({"x": Tensor()}), rf"batches\['x'\] {TENSOR}"),
    (stepped(Tensor()), f"batch {TENSOR}"),
    (evaluated(Tensor()), f"batches {TENSOR}"),
    (lambda: plain_trainer().place([Tensor()]), rf"data\[0\] {TENSOR}"),
    (ran({"x": IDS}), rf"batches\['x'\] {TOO_WIDE}"),
    (stepped({"x": IDS[0].astype(np.uint64)}), r"\['x'\] holds 7000000001, which uint"),
    (evaluated([IDS]), rf"batches\[0\] {TOO_WIDE}"),
    (lambda: plain_trainer().place([IDS]), rf"data\[0\] {TOO_WIDE}"),
    (ran({"x": X[ROWS], "y": Y[ROWS[:6]]}), rf"{Y_LEADS} \(6, 24\), but"),
    (ran({"x": X[ROWS], "y": Y[ROWS[:, :8]]}), rf"{Y_LEADS} \(12, 8\)"),
    (ran({"x": X[ROWS[:, :0]]}), "global batch of 0"),
    (ran({"x": X[ROWS[:0]]}), "batches hold no steps"),
    (ran({}), "batches hold no arrays"),
    (ran({"y": np.zeros(12)}), r"got shape \(12,\); for a single step, pass x\[N"),
    (ran(iter(X)), r"batches is .*iterator, not an array: stack the batches"),
    (ran(X[ROWS].tolist()), r"batches\[0\].* is float: convert lists to"),
    (ran(TEN), r"divide over 4 workers: .* step, pass x\["),
    (ran(accumulate=4), "6 examples of each of 4 workers .* multiple of 16, .* or 32$"),
    (evaluated(ELEVEN, counting("hits")), r"shape \(3,\) depends on the .* size: drop"),
    (evaluated(ELEVEN, counting(WEIGHT)), f"of 11 .* into 4 parts, and {WEIGHT}"),
    (stepped(TEN), r"10 does not divide .* such as 8 or 12; .* steps, call run$"),
    (stepped(X[0].tolist()), r"^batch\[0\] is float: convert lists to"),
    (stepped({"x": np.float32(0)}), r"batches\['x'\] must have axes \(steps, global_b"),
    (by_rows(ROWS.astype(float)), "must be integer row numbers"),
    (by_rows(ROWS[..., None]), "must be integer row numbers"),
    (by_rows(ROWS - 1), "rows must be 0 to 199, got -1"),
    (by_rows(jnp.asarray(ROWS) + 100), "rows must be 0 to 199"),
    (lambda: plain_trainer().place({"x": X, "y": Y[:10]}), r"'y'\] .* axes \(10,\)"),
]


def syncs(sync, period=1, init=None):
    """Starts by a sync with a period."""
    strategy = sa.Strategy(init or sa.Strategy().init, sync=sync)
    return started(strategy=sa.every(strategy, period))


def start_with_strategy(strategy):
    return started(strategy=strategy)


def fields(**functions):
    return lambda: sa.every(sa.Strategy(**functions), 2)


def cut(tree):
    return jax.tree.map(lambda x: x[:1], tree)


def to_integers(tree):
    return jax.tree.map(lambda x: x.astype(jnp.int32), tree)


CUTTING = sa.Strategy(reduce=lambda g, r, s, t: (cut(g), s))


def halving(replica, state, step):
    return replica, {"n": state["n"] * 0.5}


def count(params):
    return {"n": jnp.int32(0)}


def scalar(replica):
    return replica._replace(params={**replica.params, "w": 0.0})


def masked(**mask):
    return start_with_strategy(sa.masked(sa.bmuf(2), mask))


PYTHON_IF = (
    r"test_engine_errors.py:\d+: `.*step .*4.*` needs .*use every\(…, .* lax.cond"
)
OF_STRATEGIES = [
    (syncs(lambda r, s, t: (scalar(r), s)), r"params\['w'\] from float32\[6,1\] to fl"),
    (
        syncs(lambda r, s, t: (to_integers(r), s), 4),
        r"\['b'\] from float32\[1\] to int32",
    ),
    (
        start_with_strategy(CUTTING),
        r"reduce changes grads\['w'\] from float32\[6,1\] to float32\[1,1\]",
    ),
    (syncs(lambda r, s, t: (r, ()), 4, count), r"of state: state is \(\), not dict"),
    (syncs(halving, 1, count), r"sync changes state\['n'\] from int32\[\] to float32"),
    (syncs(lambda r, s, t: r, 4), r"sync must return \(replica, state\), got Replica"),
    (
        start_with_strategy(sa.Strategy(center=lambda p, s: p["w"])),
        "center .* is array, not dict",
    ),
    (syncs(lambda r, s, step: (r if step % 4 else None, s)), PYTHON_IF),
    (
        start_with_strategy(sa.when(sa.average(), lambda step: step in (4, 8))),
        PYTHON_IF,
    ),
    (masked(w=True), r"mask must be a tree like params: .*\['b'\] is missing"),
    (masked(w=1, b=1, c=1), r"masked: mask\['c'\] is unexpected"),
    (masked(w={"x": 1}, b=1), r"masked: mask\['w'\] is dict, not array"),
    (start_with_strategy(sa.bmuf(axis="batch")), r"strategy is syncalgos\.WORKERS"),
    (
        start_with_strategy(sa.every(sa.reset(optax.adam(0.1)), 2)),
        "the same inner optimizer",
    ),
    (fields(sync=lambda r, s: 0), r"sync .*with \(replica, state, step\)"),
    (fields(init=lambda r, s, t: 0), r"init .*called with \(params\), but"),
    (fields(center=lambda p: p), r"takes \(p\): too many positional"),
    (fields(reduce=None), r"reduce .*function of \(grads, replica, state, step\), got"),
    (lambda: sa.average("loss"), "field of Replica"),
]


def weighed(params, buffers, batch, key):
    return plain_loss(params, batch), (buffers, {WEIGHT: len(batch["x"])})


def drawn(params, buffers, batch, key):
    value = plain_loss(params, batch) * jax.random.bernoulli(key)
    return value, (buffers, {})


def growing(params, buffers, batch, key):
    return plain_loss(params, batch), ({"n": jnp.zeros(2)}, {})


def over_workers(collective):
    """Takes local steps by a loss with a collective of jax over all workers."""

    def loss(params, batch):
        return plain_loss(params, batch) + jnp.mean(collective(batch["x"][:4]))

    return losing(loss, backend="vmap")


GRAPH, OF_NNX, NNX_BUFFERS = nnx.split(Normed(RNGS), nnx.Param, ...)


def normed_loss(params, buffers, batch, key):
    """Drops what is no batch statistic."""
    model = nnx.merge(GRAPH, params, buffers)
    value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return value, (nnx.state(model, nnx.BatchStat), {})


def normed(buffers):
    trainer = make_trainer(loss=normed_loss)
    return trainer.run(trainer.init(OF_NNX, buffers), BATCHES)


def examples(values):
    return losing(sa.per_example(lambda p, b, batch, key: values(batch["x"], b)))


ALL_GATHER = over_workers(lambda x: jax.lax.all_gather(x, sa.WORKERS))
PSUM_SCATTER = over_workers(lambda x: jax.lax.psum_scatter(x, sa.WORKERS))
PPERMUTE = over_workers(lambda x: jax.lax.ppermute(x, sa.WORKERS, [(0, 1)]))
ONE_COUNT = {"n": np.zeros(1, np.float32)}
OF_LOSSES = [
    (
        make_trainer_call(loss=3),
        r"function of \(params, batch\), of .* or of .*, got 3",
    ),
    (make_trainer_call(loss=lambda p, key, batch: 0.0), r"of \(params, batch, key\)"),
    (
        make_trainer_call(loss=lambda p, buffers, batch: 0.0),
        r"takes \(p, buffers, batch\):",
    ),
    (
        make_trainer_call(loss=lambda p, batch, *, noise: 0.0),
        "keyword-only key is named key or rng",
    ),
    (
        make_trainer_call(loss=lambda p, x, y, z, key: 0.0),
        "several arrays is one argument",
    ),
    (make_trainer_call(loss=lambda p: 0.0), r"this one takes \(p\):"),
    (losing(lambda p, b, x, key: (0.0, (b, {WEIGHT: x["y"]}))), f"{WEIGHT}' must be"),
    (losing(lambda p, b, batch, key: 0.0), "loss must return"),
    (losing(lambda p, b, batch, key: (0.0, (b, 3.0))), "return .* dict of metrics"),
    (losing(lambda p, b, x, key: (x["y"], (b, {}))), r"be a scalar, .* got .*\(6, 1"),
    (losing(lambda p, batch: (0.0, {})), "must return a scalar, got 2 values: to retu"),
    (examples(lambda x, b: x), r"per_example: .* return \(values, buffers\), got "),
    (examples(lambda x, b: (x, b)), r"per_example: .* a dict, such as \{'loss': "),
    (examples(lambda x, b: ({"hit": x[:, 0]}, b)), r"must hold 'loss', .*'hit': \(6,"),
    (examples(lambda x, b: ({"loss": x}, b)), r"must hold 'loss', .*'loss': \(6, 6\)"),
    (examples(lambda x, b: ({"loss": x[0], WEIGHT: x[0]}, b)), f"not hold '{WEIGHT}'"),
    (losing(growing), r"the loss changes .* of buffers: buffers is dict, not \(\)"),
    (
        losing(growing, buffers=ONE_COUNT, accumulate=2),
        r"\['n'\] from float32\[1\] to fl",
    ),
    (lambda: normed(NNX_BUFFERS), r"of buffers: buffers\['dropout'\] is missing"),
    (ALL_GATHER, r"^jax\.lax\.all_gather .*collectives\.gather$"),
    (PSUM_SCATTER, r"^jax\.lax\.psum_scatter .*collectives\.mean$"),
    (PPERMUTE, r"^jax\.lax\.ppermute .*collectives\.shift$"),
]


BMUF = sa.bmuf()
SYNC_SGD = sa.sync_sgd()


def talking(params, batch):
    return plain_loss(params, batch) + sa.collectives.mean(params["w"][0, 0])


def talking_by_jax(params, batch):
    return jax.lax.pmean(plain_loss(params, batch), "lanes")


def in_turn(loss=None, strategy=BMUF):
    return losing(loss, strategy=strategy, lane_form="sequential")


def merged(loss=None, strategy=SYNC_SGD, buffers=()):
    return losing(loss, BATCHES, buffers, strategy=strategy, lane_form="merged")


OF_FORMS = [
    (
        in_turn(strategy=SYNC_SGD),
        "'sequential': the strategy reduces gradients: use lane_form='vectorized'",
    ),
    (in_turn(talking), "'sequential': .* communicates with other workers"),
    (in_turn(talking_by_jax), "'sequential': .* communicates with other workers"),
    (merged(strategy=BMUF), "'merged': .*does not take the mean of all gradients"),
    (merged(growing, buffers={"n": np.zeros(2, np.float32)}), "has buffers of its own"),
    (merged(drawn), "lane_form cannot be 'merged': .*draws from each worker's own key"),
    (merged(weighed), f"'merged': .*weighs its batches by '{WEIGHT}'"),
    (merged(talking), "'merged': .*communicates with other workers"),
    (merged(strategy=SYNC_SGD._replace(sees_loss=True)), "each worker's own loss"),
]


def donated(use):
    """Uses a state that was given to a run: a pmap would end the interpreter."""

    def call():
        state = plain_trainer().init(PARAMS)
        plain_trainer().run(state, BATCHES)
        use(plain_trainer(), state)

    return call


def from_host(trainer, state):
    return trainer.from_host(plain_trainer().to_host(state))


NO_STATE = r"state must be a TrainState, got \{'w'"
GIVEN_UP = "donated to an earlier run"
SLOWMO = sa.slowmo(3, learning_rate=0.1)
NOT_SLOWMO = "another strategy: {}.sync is BMUFState, not SlowMoState$"
NOT_ADAM = r"optimizer: held.replica.opt_state\[0\] is TraceState, not Scale"
IN_JIT = "call it outside jax"
OF_STATES = [
    (usual(lambda trainer, _: trainer.run(PARAMS, BATCHES)), NO_STATE),
    (usual(lambda trainer, _: trainer.center(PARAMS)), NO_STATE),
    (usual(lambda trainer, _: trainer.divergence(PARAMS)), NO_STATE),
    (usual(lambda trainer, _: trainer.to_host(PARAMS)), NO_STATE),
    (usual(lambda trainer, _: trainer.communication(PARAMS, steps=1)), NO_STATE),
    (usual(lambda trainer, x: trainer.center((x, {}))), "tuple; unpack the .* of run"),
    (usual(lambda trainer, x: jax.jit(trainer.run)(x, BATCHES)), IN_JIT),
    (usual(lambda t, x: jax.jit(lambda y: t.run(x, y))(BATCHES)), IN_JIT),
    (other(lambda t, x: t.run(x, BATCHES), SLOWMO), NOT_SLOWMO.format("state")),
    (other(lambda t, x: t.center(x), SYNC_SGD), "BMUFState, not EmptyState$"),
    (other(from_host, SLOWMO), NOT_SLOWMO.format("held")),
    (other(from_host, sa.bmuf(3), optax.adam(0.1)), NOT_ADAM),
    (lambda: make_trainer(None, 6).center(plain_state()), r"\(2, 2\), but .* = \(3,"),
    (donated(lambda trainer, x: trainer.run(x, BATCHES)), GIVEN_UP),
    (donated(lambda trainer, x: trainer.center(x)), GIVEN_UP),
    (donated(lambda trainer, x: trainer.divergence(x)), GIVEN_UP),
]


def tabled(tables=two_tables.TABLES, workers=4, strategy=SYNC_SGD):
    def make():
        return two_tables.make(strategy, workers, tables=tables)

    return started(two_tables.START, make=make)


def by_size(params):
    return jax.tree.map(lambda x: x.size > 11, params)


WITHOUT = sa.Strategy(sync=lambda r, s, t: (r._replace(opt_state=()), s))
FLOATS = np.zeros((3, 2))
TWO_INTEGERS = np.zeros(2, int)
CUT = {"accumulate": 2, "tables": {"w": True, "b": False}}
SPLIT_LOSS = losing(
    lambda p, b, x, key: (p["w"].sum(), (b, {WEIGHT: 1})),
    workers=3,
    backend="vmap",
    **CUT,
)
OF_TABLES = [
    (tabled(workers=8), r"'scale'\] has 12 rows, .* over 8 workers: pad it to 16 r"),
    (tabled({**two_tables.TABLES, "rest": True}), r"\['rest'\]\['bias'\] is a scalar"),
    (tabled({**two_tables.TABLES, "rest": 1}), "tables must hold booleans, got 1"),
    (tabled({"words": True}), "tables must be a tree like params"),
    (tabled(by_size), "tables must not depend on the number of rows"),
    (tabled(strategy=WITHOUT), "sync changes the structure of replica"),
    (tabled(strategy=sa.fedavg(2)), "of workers that skip or rest: use no particip"),
    (tabled(strategy=sa.paced(sa.bmuf(2), [1, 2, 2, 2])), "that skip or rest"),
    (SPLIT_LOSS, f"tables: a loss that returns '{WEIGHT}' needs accumulate=1"),
    (lambda: sa.lookup(FLOATS, FLOATS), r"ids must be integers, got float32\[3,2\]"),
    (
        lambda: sa.lookup(TWO_INTEGERS, TWO_INTEGERS),
        "part must be float rows of a table",
    ),
    (
        lambda: sa.lookup(np.zeros(()), TWO_INTEGERS),
        r"part must be .* table, got float32\[\]",
    ),
]
NUMBERS = {"lr": 0.1, "mu": 0.5}


def numbered(numbers, strategy=None):
    """A trainer of hyperparameters."""
    return sa.DataParallel(
        plain_loss,
        lambda numbers: optax.sgd(numbers["lr"]),
        strategy or (lambda numbers: sa.bmuf(2, block_momentum=numbers["mu"])),
        workers=4,
        hyperparams=numbers,
    )


def of_period(numbers):
    return sa.bmuf(numbers["mu"])


def other_numbers(numbers):
    return started(hyperparams=numbers, make=lambda: numbered(NUMBERS))


VECTOR = r"\['mu'\] must be a number, got .*; train .* in turn: .* is compiled once$"
OF_NUMBERS = [
    (lambda: numbered({"lr": "0.1"}), r"hyperparams\['lr'\] must be a number"),
    (lambda: numbered({**NUMBERS, "mu": True}), r"params\['mu'\] must be a number"),
    (lambda: numbered({**NUMBERS, "mu": 1.0}), "block_momentum must be .* 1, got 1.0"),
    (lambda: numbered(None, sa.bmuf), r"expected a Strategy, got <function bmuf"),
    (other_numbers({"lr": 0.1}), r"hyperparams\['mu'\] is missing"),
    (other_numbers({**NUMBERS, "b": 1}), r"hyperparams\['b'\] is unexpected"),
    (other_numbers({**NUMBERS, "mu": -0.5}), "block_momentum must be .* got -0.5"),
    (other_numbers({**NUMBERS, "mu": np.ones(2)}), VECTOR),
    (started(make=lambda: numbered(NUMBERS, of_period)), "period must be .* number"),
]


def averaging_if(asks):
    """Averages where a function of (params' sum, state, step) is true."""

    def sync(replica, state, step):
        total = sum(jnp.sum(x) for x in jax.tree.leaves(replica.params))

        def averaged():
            return replica._replace(params=sa.collectives.mean(replica.params))

        new = jax.lax.cond(asks(total, state, step), averaged, lambda: replica)
        return new, {"count": state["count"] + 1, "sum": 0.9 * state["sum"] + total}

    def init(_):
        return {"count": jnp.int32(0), "sum": jnp.float32(0)}

    return sa.Strategy(init, sync=sync)


def looping_mean(replica, state, step):
    """Averages a number until it is small."""
    total = sum(jnp.sum(x) for x in jax.tree.leaves(replica.params))
    jax.lax.while_loop(lambda x: x > 1, lambda x: sa.collectives.mean(x) / 2, total)
    return replica, state


def by_own_loss(replica, state, step):
    def averaged():
        return sa.collectives.mean(replica.params)

    params = jax.lax.cond(replica.loss > 1, averaged, lambda: replica.params)
    return replica._replace(params=params), state


def normalizing_if(asks):
    """A loss less the mean of all workers', where a function of the batch is true."""

    def loss(params, batch):
        value = jnp.mean((batch["x"] @ params["w"]) ** 2)
        shared_mean = jax.lax.cond(
            asks(batch["x"]), sa.collectives.mean, jnp.zeros_like, value
        )
        return value - shared_mean

    return loss


def lone(asks, backend="vmap"):
    return started(strategy=averaging_if(asks), backend=backend)


LARGE = averaging_if(lambda total, state, step: total > 1)
BRANCH = "a branch that depends on one worker's data contains .* .psum.*decided"
OF_LONE_BRANCHES = [
    (lone(lambda total, state, step: total > 1), BRANCH),
    (lone(lambda total, state, step: state["sum"] > 1), BRANCH),
    (lone(lambda *_: sa.collectives.index() == 0, "auto"), BRANCH),
    (start_with_strategy(sa.every(LARGE, 4)), BRANCH),
    (
        start_with_strategy(sa.Strategy(sync=looping_mean)),
        BRANCH.replace("branch", "loop"),
    ),
    (start_with_strategy(sa.Strategy(sync=by_own_loss, sees_loss=True)), BRANCH),
    (losing(normalizing_if(lambda x: x.sum() > 1)), BRANCH),
]
REFUSED = [
    *(*OF_LAYOUTS, *OF_PARAMS, *OF_OPTIMIZERS, *OF_BATCHES, *OF_STRATEGIES),
    *(*OF_LOSSES, *OF_FORMS, *OF_STATES, *OF_TABLES, *OF_NUMBERS, *OF_LONE_BRANCHES),
]


@pytest.mark.parametrize(("call", "words"), REFUSED, ids=[x for _, x in REFUSED])
def test_what_cannot_be_is_refused_in_one_line(call, words):
    with pytest.raises(ValueError, match=words) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_what_cannot_be_an_untyped_key_is_a_buffer():
    two = np.zeros(2, np.uint32)
    counts = {"rng": {"count": two}, "seen": two.astype(np.int32), "one": two[:1]}
    state = plain_trainer().init(PARAMS, counts)
    assert not any(np.any(x) for x in jax.tree.leaves(state.replica.buffers))


def test_an_assertion_of_the_users_stays_theirs():
    def loss(params, batch):
        assert not params, "mine"

    with pytest.raises(AssertionError, match=r"^mine"):
        losing(loss, backend="vmap")()


def test_params_are_said_to_be_where_they_are():
    trainer = plain_trainer()
    state = plain_state()
    with pytest.raises(AttributeError, match=r"center\(state\).params for one plain"):
        _ = state.params  # pyright: ignore
    with pytest.raises(TypeError, match=r"use .params\['w'\]"):
        trainer.center(state)["w"]
    assert not hasattr(state, "__jax_array__")
    assert trainer.center(state)[0]["w"].shape == (6, 1)


class Settings(NamedTuple):
    rate: object
    rest: object = ()


def linear(inputs):
    return eqx.nn.Linear(inputs, 1, key=jax.random.key(0))


@pytest.mark.parametrize(
    ("expected_tree", "tree", "message"),
    [
        ({"a": 1, "b": {"c": 2}}, {"a": 1}, "tree['b'] is missing"),
        ({"a": 1}, {"a": 1, "b": 2}, "tree['b'] is unexpected"),
        ({"a": [1, 2]}, {"a": [1]}, "tree['a'][1] is missing"),
        ({"a": [1, 2]}, {"a": (1, 2)}, "tree['a'] is tuple, not list"),
        ({"a": 1}, {"a": None}, "tree['a'] is None, not array"),
        ({"a": ()}, {"a": 1}, "tree['a'] is array, not ()"),
        (Settings(1, [2]), Settings(1, [2, 3]), "tree.rest[1] is unexpected"),
        (linear(1), linear(2), "tree, a Linear, has other static fields"),
        ({"a": 1}, {"a": 2.0}, ""),
    ],
)
def test_trees_that_differ_name_the_first_place(expected_tree, tree, message):
    assert checks.unlike("tree", expected_tree, tree) == message


def test_an_error_of_a_loss_without_buffers_tells_of_them():
    with pytest.raises(ValueError) as error:
        normed(())
    called, hint, *_ = error.value.__notes__
    assert called.endswith("a State, batch['x'] (6, 6), batch['y'] (6, 1)")
    assert hint.startswith("this loss got no buffers")


def test_an_error_of_a_loss_of_two_arrays_says_that_the_second_is_the_key():
    trainer = make_trainer(loss=lambda params, x, y: jnp.mean(x @ params["w"] - y))
    with pytest.raises(TypeError) as error:
        trainer.run(trainer.init(PARAMS), BATCHES["x"])
    assert "third argument, 'y', got a random key" in "".join(error.value.__notes__)


@pytest.mark.parametrize(
    "strategy",
    [
        averaging_if(lambda total, state, step: step % 2 == 1),
        averaging_if(lambda total, state, step: state["count"] % 2 == 1),
        averaging_if(lambda total, *_: sa.collectives.mean(total) > 1),
        sa.chain(sa.sync_sgd(), LARGE),
        sa.chain(sa.model_averaging(2), sa.every(LARGE, 2)),
    ],
    ids=["step", "counter", "agreed number", "equal replicas", "agreed model"],
)
def test_a_branch_that_all_workers_take_may_hold_a_collective(strategy):
    assert make_trainer(strategy, backend="vmap").init(PARAMS).step == 0


def test_a_branch_of_a_loss_that_all_workers_take_may_hold_a_collective():
    loss = normalizing_if(lambda x: sa.collectives.mean(x.sum()) > 1)
    trainer = make_trainer(loss=loss)
    assert trainer.run(trainer.init(PARAMS), BATCHES)[0].step > 0


PHASES = sa.chain(sa.until(sa.sync_sgd(), 9), sa.after(sa.bmuf(3), 9))


@pytest.mark.parametrize(
    ("strategy", "waits"),
    [
        (sa.bmuf(6), {0: True, 3: True, 6: False}),
        (sa.model_averaging(8), {3: False}),  # the mean has all steps in it
        (PHASES, {3: False}),
    ],
    ids=["bmuf", "mean", "phases"],
)
def test_a_center_waits_untrained_for_the_first_sync(strategy, waits):
    assert {steps: waits_untrained(strategy, steps) for steps in waits} == waits


def test_an_untrained_center_is_warned_of_once():
    trainer = make_trainer(sa.bmuf(6), backend="vmap")
    state = trainer.init(PARAMS)
    three = jax.tree.map(lambda x: x[:3], BATCHES)
    for steps in (0, 3, 6):
        if steps:
            state, _ = trainer.run(state, three)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.center(state)
            trainer.evaluate(state, three)
        warning_start = (
            f"no sync came in the first local steps ({steps}): the center, the model to"
        )
        texts = [str(x.message)[: len(warning_start)] for x in caught]
        assert texts == [warning_start] * (steps == 3)
        assert all(x.filename == __file__ for x in caught)


def test_a_warning_names_buffers_that_no_loss_sees():
    buffers = {"mean": jnp.zeros(3)}
    with pytest.warns(UserWarning, match="never sees these buffers") as caught:
        plain_trainer().init(PARAMS, buffers)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_trainer().init(PARAMS)
        make_trainer(eval_loss=normed_loss).init(PARAMS, buffers)


def test_functions_that_tell_no_signature_are_taken():
    assert isinstance(sa.every(sa.Strategy(init=iter), 2), sa.Strategy)


def test_steps_that_would_wrap_are_refused():
    """In int32 they would go on from -2³¹, and `until` would begin anew."""
    trainer = plain_trainer()
    state = trainer.init(PARAMS)
    state = state._replace(step=jnp.int32(2**31 - 1 - len(X[ROWS])))
    state, _ = trainer.run(state, BATCHES)
    assert int(state.step) == 2**31 - 1
    host_state = trainer.to_host(state)
    for again in (state, trainer.from_host(host_state)):
        with pytest.raises(ValueError, match="got 214748365"):
            trainer.run(again, BATCHES)
    with pytest.raises(ValueError, match="got 2147483648"):
        trainer.from_host(host_state._replace(step=np.int64(2**31)))
