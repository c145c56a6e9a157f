"""What the engine refuses: a row of REFUSED is a call and words of its one line."""

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
from problems import two_tables
from problems.linear import (
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

PARAMS = make_params()


@functools.cache
def plain_state():
    """A state that those may take who refuse it, or what comes with it."""
    return plain_trainer().init(PARAMS)


def made(strategy=None, **options):
    """Makes a trainer."""
    return lambda: make_trainer(strategy, **options)


def started(params=PARAMS, buffers=(), *, hyperparams=None, make=None, **options):
    """Makes the first state: what is refused is refused before it is compiled."""

    def call():
        trainer = (make or make_trainer)(**options)
        try:
            trainer.init(params, buffers, hyperparams=hyperparams)
        finally:
            assert trainer.compile_seconds == 0

    return call


def ran(batches=BATCHES, buffers=(), **options):
    """Takes local steps."""

    def call():
        trainer, state = make_trainer(**options), plain_state()
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


def other(use, strategy=None, optimizer=None):
    """Uses another trainer, with the state of the usual one."""
    optimizer = optimizer or optax.sgd(0.05, momentum=0.9)
    strategy = strategy or sa.bmuf(3)
    loss = sa.stateless(plain_loss)
    return lambda: use(
        sa.DataParallel(loss, optimizer, strategy, workers=4), plain_state()
    )


def with_optimizer(optimizer, strategy=None, **options):
    def make():
        given = plain_loss, optimizer, strategy or sa.sync_sgd()
        return sa.DataParallel(*given, **({"workers": 2} | options))

    return started(make=make)


OF_LAYOUTS = [
    (made(workers=0), "workers must be a whole number of at least 1, got 0"),
    (made(workers=2.5), "workers must be a whole number of at least 1, got 2.5"),
    (made(backend="pmpa"), "unknown backend 'pmpa'; did you mean 'pmap'"),
    (made(devices=[5]), "device 5 does not exist"),
    (made(devices=[-1]), "a device must be a whole number of at least 0, got -1"),
    (made(devices=[0, 0]), "devices must be distinct"),
    (made(devices=[]), "at least one"),
    (made(devices=2), "devices must be a list of indices or devices, got 2"),
    (made(devices=[0, 1, 2]), "4 workers do not divide over 3 devices"),
    (made(backend="vmap", devices=[0, 1]), "'vmap' runs on one device, got 2"),
    (made(workers=6, lanes=4), "lanes must divide the 6 workers, got 4"),
    (made(workers=6, lanes=1), "6 workers in 1 lanes need 6 devices"),
    (made(workers=6, lanes=3, devices=[0]), "6 workers on 1 .* lanes=6, got 3"),
    (made(lanes=0), "lanes must be .*at least 1"),
    (made(lane_form="merge"), "lane_form.*merged"),
    (made(accumulate=1.5), "accumulate must be a whole number of at least 1, got 1.5"),
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
STATISTICS = {"norm": {"mean": np.zeros(1, np.float32)}}
STEP = r"^params\['layers'\]\[1\]\['step'\] is.* {}.*belongs in buffers"
UNTYPED = r"buffers\['rng'\] is uint32\[2\].*jax\.random\.wrap_key_data"


def with_step(leaf):
    return started({"layers": [{"w": np.zeros(3)}, {"step": leaf}]})


OF_PARAMS = [
    (with_step(np.int32(3)), STEP.format("of dtype int32")),
    (with_step(np.zeros(3, bool)), STEP.format("of dtype bool")),
    (with_step(jax.random.key(0)), STEP.format("of dtype key<fry>")),
    (with_step("text"), STEP.format("str")),
    (with_step(plain_loss), STEP.format("function")),
    (started({"w": 1.5}), r"params\['w'\] is float.*asarray\(1\.5\)$"),
    (started(Normed), r"^params is .* an object of this class, Normed\(…\)$"),
    (started({}), "params hold no arrays"),
    (started(buffers={"rng": jax.random.PRNGKey(0)}), UNTYPED),
    (started(buffers={"rng": np.asarray(jax.random.PRNGKey(0))}), UNTYPED),
    (started(NORMED), r"params\['norm'\]\['mean'\] is a BatchStat, .* trained: split"),
    (
        started(nnx.Sequential(LINEAR, nnx.BatchNorm(1, rngs=RNGS))),
        r"is a BatchStat, which is not trained: .* by nnx.split\(model, nnx.Param",
    ),
    (
        started({"params": PARAMS, "batch_stats": STATISTICS}),
        r"batch_stats'\] is not trained: pass variables.pop\('params'\) as",
    ),
    (
        started(eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0))),
        r"params\.activation is .* eqx\.partition\(",
    ),
    (started(nnx.Dropout(0.5, rngs=RNGS)), r"\.count.* nnx\.split\(model, nnx\.Param"),
]


OF_OPTIMIZERS = [
    (made(sa.bmuf), r"expected a Strategy, .*call it: bmuf\(\)"),
    (made("bmuf"), r"got 'bmuf' \(.* is an object: syncalgos.bmuf\(\)\)"),
    (made(optax.sgd(0.1)), "an optimizer. check the order of the"),
    (
        with_optimizer(optax.sgd),
        r"must be an optax optimizer, .*\(call it: sgd\(…\)\)$",
    ),
    (
        with_optimizer(optax.linear_schedule(1, 0, 9)),
        r"got .{,60} \(a schedule is .*sgd\(schedule\)\)$",
    ),
    (with_optimizer("sgd"), r"\(an optimizer is an object: optax.sgd\(…\)\)$"),
    (
        with_optimizer(nnx.Optimizer(LINEAR, optax.sgd(1.0), wrt=nnx.Param)),
        r"got .{,60} \(pass its .tx\)$",
    ),
    (
        with_optimizer(optax.contrib.schedule_free_sgd(0.1)),
        "^optimizer: schedule_free evaluates another model",
    ),
    (
        with_optimizer(optax.lookahead(optax.sgd(0.1), 5, 0.5)),
        r"^optimizer: .*with .* syncalgos.lookahead\(\)",
    ),
    (with_optimizer(optax.lbfgs()), "a line search needs the loss at other params"),
    (
        with_optimizer(
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))
        ),
        "a line search needs the loss",
    ),
    (
        with_optimizer(optax.apply_if_finite(optax.contrib.schedule_free_adamw(), 3)),
        "docs/own-loop.md",
    ),
    (
        with_optimizer(optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1))),
        "sam moves params to",
    ),
    (with_optimizer(optax.contrib.sophia(0.1)), "Hessian needs the loss"),
    # One of unlike data would lower its rate for good while others keep theirs.
    (
        with_optimizer(
            optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), sa.bmuf(4)
        ),
        "reduce_on_plateau .* each worker's own",
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


def counting(name):
    """A loss with a metric that is no mean of examples."""

    def loss(params, buffers, batch, key):
        hits = batch["x"][:, 0] > 0
        found = {name: hits if name == "hits" else hits.sum()}
        return plain_loss(params, batch), (buffers, found)

    return loss


ELEVEN = jax.tree.map(lambda x: x[:, :11], BATCHES)
OF_BATCHES = [
    (ran({"x": X[ROWS], "y": Y[ROWS[:6]]}), rf"{Y_LEADS} \(6, 24\), but"),
    (ran({"x": X[ROWS], "y": Y[ROWS[:, :8]]}), rf"{Y_LEADS} \(12, 8\)"),
    (ran({"x": X[ROWS], "y": np.zeros(12)}), r"must have axes \(steps, global_batch"),
    (ran({"x": X[ROWS[:, :0]]}), "global batch of 0"),
    (ran({"x": X[ROWS[:0]]}), "batches hold no steps"),
    (ran({}), "batches hold no arrays"),
    (
        ran({"y": np.zeros(12)}),
        r"got shape \(12,\); for a single step, pass x\[N",
    ),
    (ran(iter(X)), r"batches is .*iterator, not an array: stack the batches"),
    (ran(X[ROWS].tolist()), r"batches\[0\].* is float: convert lists to"),
    (ran({"x": X[ROWS[:, :10]]}), r"divide over 4 workers: .* step, pass x\["),
    (ran(TEN), r"divide over 4 workers: .* step, pass x\["),
    (ran(accumulate=4), "6 examples of each of 4 workers .* multiple of 16, .* or 32$"),
    (ran({"x": X[ROWS[:, :10]]}, accumulate=4), "batch of 10 does not .* over 4"),
    (evaluated({"x": X[ROWS], "y": Y[ROWS[:6]]}), rf"{Y_LEADS} \(6, 24\), but"),
    (evaluated(X[ROWS].tolist()), r"batches\[0\].* is float: convert lists to"),
    (evaluated(ELEVEN, counting("hits")), r"shape \(2,\) depends on the .* size: drop"),
    (
        evaluated(ELEVEN, counting("microbatch_weight")),
        "batches of 11 do not divide into 4 parts, and microbatch_weight",
    ),
    (
        stepped(TEN),
        r"10 does not divide .* such as 8 or 12; .* steps, call run$",
    ),
    (stepped(X[0].tolist()), r"^batch\[0\] is float: convert lists to"),
    (stepped({"x": np.float32(0)}), r"batches\['x'\] must have axes \(steps, global_b"),
    (by_rows(ROWS.astype(float)), "must be integer row numbers"),
    (by_rows(ROWS[..., None]), "must be integer row numbers"),
    (by_rows(ROWS - 1), "rows must be 0 to 199, got -1"),
    (by_rows(jnp.asarray(ROWS) + 100), "rows must be 0 to 199"),
    (
        lambda: plain_trainer().place({"x": X, "y": Y[:10]}),
        r"data\['y'\] has leading axes \(10,\)",
    ),
]


def syncs(sync, period=1, init=None, **fields):
    """Starts by a strategy that is made of these functions, with a period."""
    fields |= {"init": init} if init else {}
    strategy = sa.Strategy(sync=sync, **fields)
    return started(strategy=sa.every(strategy, period))


def cut(tree):
    return jax.tree.map(lambda x: x[:1], tree)


def whole(tree):
    return jax.tree.map(lambda x: x.astype(jnp.int32), tree)


def count(params):
    return {"n": jnp.int32(0)}


def short(mask):
    return started(strategy=sa.masked(sa.bmuf(2), mask))


PYTHON_IF = r"test_engine_errors.py:\d+: `.*step .*4.*` needs .*use every\(…, schedule"
OF_STRATEGIES = [
    (
        syncs(lambda r, s, t: (r._replace(params={**r.params, "w": 0.0}), s)),
        r"sync changes replica.params\['w'\] from float32\[6,1\] to float32\[\]",
    ),
    (
        syncs(lambda r, s, t: (whole(r), s), 4),
        r"sync changes replica.params\['b'\] from float32\[1\] to int32\[1\]",
    ),
    (
        started(strategy=sa.Strategy(reduce=lambda g, r, s, t: (cut(g), s))),
        r"reduce changes grads\['w'\] from float32\[6,1\] to float32\[1,1\]",
    ),
    (
        syncs(lambda r, s, t: (r, ()), 4, count),
        r"sync changes the structure of state: state is \(\), not dict",
    ),
    (
        syncs(lambda r, s, t: (r, {"n": s["n"] * 0.5}), 1, count),
        r"sync changes state\['n'\] from int32\[\] to float32\[\]",
    ),
    (syncs(lambda r, s, t: r, 4), r"sync must return \(replica, state\), got Replica"),
    (
        started(strategy=sa.Strategy(center=lambda p, s: p["w"])),
        "center changes the structure of params: params is array, not dict",
    ),
    (syncs(lambda r, s, step: (r if step % 4 else None, s)), PYTHON_IF),
    (started(strategy=sa.when(sa.average(), lambda step: step in (4, 8))), PYTHON_IF),
    (
        short({"w": True}),
        r"mask must be .* params: masked: mask\['b'\] is missing",
    ),
    (short({"w": 1, "b": 1, "c": 1}), r"masked: mask\['c'\] is unexpected"),
    (short({"w": {"x": 1}, "b": 1}), r"masked: mask\['w'\] is dict, not array"),
    (started(strategy=sa.bmuf(axis="batch")), r"strategy is syncalgos\.WORKERS"),
    (
        started(strategy=sa.every(sa.reset(optax.adam(0.1)), 2)),
        "the same inner optimizer",
    ),
    (
        lambda: sa.every(sa.Strategy(sync=lambda replica, state: 0), 2),
        r"sync .*with \(replica, state, step\)",
    ),
    (
        lambda: sa.every(sa.Strategy(init=lambda replica, state, step: 0), 2),
        r"init .*called with \(params\), but",
    ),
    (
        lambda: sa.every(sa.Strategy(center=lambda params: params), 2),
        r"takes \(params\): too many positional",
    ),
    (
        lambda: sa.every(sa.Strategy(reduce=None), 2),
        r"reduce .*function of \(grads, replica, state, step\), got",
    ),
    (lambda: sa.average("loss"), "field of Replica"),
]


def weighed(params, buffers, batch, key):
    metrics = {"microbatch_weight": len(batch["x"])}
    return plain_loss(params, batch), (buffers, metrics)


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


OF_LOSSES = [
    (made(loss=lambda p, b, batch: 0.0), r"of \(params, batch\), of \(params, batch, "),
    (made(loss=3), r"function of \(params, batch\), of .* or of .*, got 3"),
    (made(loss=lambda p, key, batch: 0.0), r"of \(params, batch, key\)"),
    (
        losing(lambda p, b, x, key: (0.0, (b, {"microbatch_weight": x["y"]}))),
        r"microbatch_weight' must be a scalar, got shape \(6, 1\)",
    ),
    (losing(lambda p, b, x, key: plain_loss(p, x)), "loss must return"),
    (
        losing(lambda p, b, x, key: (plain_loss(p, x), (b, 3.0))),
        "loss must return .* dict of metrics",
    ),
    (
        losing(lambda p, b, x, key: (x["x"] @ p["w"], (b, {}))),
        r"loss must be a scalar, the mean over its batch, got shape \(6, 1\)",
    ),
    (
        losing(lambda p, x: (plain_loss(p, x), {})),
        "must return a scalar, got 2 values: to return metrics, write",
    ),
    (
        losing(sa.per_example(lambda p, b, x, key: plain_loss(p, x))),
        r"per_example: the function must return \(values, buffers\), got ",
    ),
    (
        losing(sa.per_example(lambda p, b, x, key: (plain_loss(p, x), b))),
        r"per_example: values must be a dict, such as \{'loss': ",
    ),
    (
        losing(lambda p, b, x, key: (plain_loss(p, x), ({"new": 0.0}, {}))),
        r"the loss changes the structure of buffers: buffers is dict, not \(\)",
    ),
    (
        losing(growing, buffers={"n": np.zeros(1, np.float32)}, accumulate=2),
        r"the loss changes buffers\['n'\] from float32\[1\] to float32\[2\]",
    ),
    (lambda: normed(NNX_BUFFERS), r"of buffers: buffers\['dropout'\] is missing"),
    (
        over_workers(lambda x: jax.lax.all_gather(x, sa.WORKERS)),
        r"^jax\.lax\.all_gather .*collectives\.gather$",
    ),
    (
        over_workers(lambda x: jax.lax.psum_scatter(x, sa.WORKERS)),
        r"^jax\.lax\.psum_scatter .*collectives\.mean$",
    ),
    (
        over_workers(lambda x: jax.lax.ppermute(x, sa.WORKERS, [(0, 1)])),
        r"^jax\.lax\.ppermute .*collectives\.shift$",
    ),
]


def talking(params, batch):
    return plain_loss(params, batch) + sa.collectives.mean(params["w"][0, 0])


def in_form(form, loss=None, strategy=None, buffers=()):
    strategy = strategy or sa.sync_sgd()
    return losing(loss, BATCHES, buffers, strategy=strategy, lane_form=form)


def seeing_loss(reduce):
    return sa.average()._replace(sees_loss=True, reduce=reduce)


IN_TURN = "lane_form cannot be 'sequential': .*"
MERGED = "lane_form cannot be 'merged': .*"
OF_FORMS = [
    (in_form("sequential"), IN_TURN + "the strategy reduces gradients"),
    (
        in_form("merged", strategy=sa.bmuf()),
        MERGED + "does not take the mean of all gradients",
    ),
    (
        in_form("merged", growing, buffers={"n": np.zeros(2, np.float32)}),
        MERGED + "each worker has buffers of its own",
    ),
    (in_form("merged", drawn), MERGED + "draws from each worker's own key"),
    (in_form("merged", weighed), MERGED + "weighs its batches by 'microbatch_weight'"),
    (
        in_form("merged", strategy=seeing_loss(sa.sync_sgd().reduce)),
        MERGED + "the strategy sees each worker's own loss",
    ),
    (in_form("sequential", talking, sa.bmuf()), IN_TURN + "communicates with other"),
    (
        in_form(
            "sequential",
            lambda p, b: jax.lax.pmean(plain_loss(p, b), "lanes"),
            sa.bmuf(),
        ),
        IN_TURN + "communicates with other workers",
    ),
]


def uses_with(given):
    return [
        usual(lambda trainer, _: trainer.run(given, BATCHES)),
        usual(lambda trainer, _: trainer.center(given)),
        usual(lambda trainer, _: trainer.divergence(given)),
        usual(lambda trainer, _: trainer.to_host(given)),
        usual(lambda trainer, _: trainer.communication(given, steps=1)),
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


MUST_BE = r"state must be a TrainState, got \{'w'"
GIVEN_UP = "donated to an earlier run"
SLOWMO = sa.slowmo(3, learning_rate=0.1)
OF_STATES = [
    *((use, MUST_BE) for use in uses_with(PARAMS)),
    (
        usual(lambda trainer, state: trainer.run((state, {}), BATCHES)),
        "got a tuple; unpack the result of run: state, me",
    ),
    (usual(lambda t, state: jax.jit(t.run)(state, BATCHES)), "call it outside jax"),
    (
        usual(lambda t, state: jax.jit(lambda x: t.run(state, x))(BATCHES)),
        "call it outside jax",
    ),
    (
        other(lambda trainer, state: trainer.run(state, BATCHES), SLOWMO),
        "another strategy: state.sync is BMUFState, not SlowMoState$",
    ),
    (
        other(lambda trainer, state: trainer.center(state), sa.sync_sgd()),
        "another strategy: state.sync is BMUFState, not EmptyState$",
    ),
    (
        other(from_host, SLOWMO),
        "another strategy: held.sync is BMUFState, not SlowMoState$",
    ),
    (
        other(from_host, optimizer=optax.adam(0.1)),
        r"optimizer: held.replica.opt_state\[0\] is TraceState, not Scale",
    ),
    (
        lambda: make_trainer(workers=6).run(plain_state(), BATCHES),
        r"axes \(2, 2\), but .* = \(3, 2\)",
    ),
    (donated(lambda trainer, state: trainer.run(state, BATCHES)), GIVEN_UP),
    (donated(lambda trainer, state: trainer.evaluate(state, BATCHES)), GIVEN_UP),
    (donated(lambda trainer, state: trainer.center(state)), GIVEN_UP),
    (donated(lambda trainer, state: trainer.divergence(state)), GIVEN_UP),
]


def tabled(tables, workers=4, strategy=None):
    strategy = strategy or sa.sync_sgd()
    return started(
        two_tables.START,
        make=lambda: two_tables.make(strategy, workers, tables=tables),
    )


def by_size(params):
    return jax.tree.map(lambda x: x.size > 11, params)


OF_TABLES = [
    (
        tabled(two_tables.TABLES, workers=8),
        r"tables: params\['scale'\] has 12 rows, .* over 8 workers: pad it to 16 rows$",
    ),
    (
        tabled({**two_tables.TABLES, "rest": True}),
        r"params\['rest'\]\['bias'\] is a scalar",
    ),
    (tabled({**two_tables.TABLES, "rest": 1}), "tables must hold booleans, got 1"),
    (tabled({"words": True}), "tables must be a tree like params"),
    (tabled(by_size), "tables must not depend on the number of rows"),
    (
        tabled(
            two_tables.TABLES,
            strategy=sa.Strategy(sync=lambda r, s, t: (r._replace(opt_state=()), s)),
        ),
        "sync changes the structure of replica",
    ),
    (
        lambda: sa.lookup(np.zeros((3, 2)), np.zeros(2)),
        r"ids must be integers, got float32\[2\]",
    ),
    (
        lambda: sa.lookup(np.zeros((3, 2), int), np.zeros(2, int)),
        "part must be float rows of a table",
    ),
    (
        lambda: sa.lookup(np.zeros(()), np.zeros(2, int)),
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


def other_numbers(numbers):
    return started(hyperparams=numbers, make=lambda: numbered(NUMBERS))


VECTOR = (
    r"hyperparams\['mu'\] must be a number, got .*; train the settings in turn: "
    "numbers are data, so the program is compiled once$"
)
OF_NUMBERS = [
    (lambda: numbered({"lr": "0.1"}), r"hyperparams\['lr'\] must be a number"),
    (lambda: numbered({**NUMBERS, "mu": True}), r"params\['mu'\] must be a number"),
    (lambda: numbered({**NUMBERS, "mu": 1.0}), "block_momentum must be .* 1, got 1.0"),
    (lambda: numbered(None, sa.bmuf), r"expected a Strategy, got <function bmuf"),
    (other_numbers({"lr": 0.1}), r"hyperparams\['mu'\] is missing"),
    (other_numbers({**NUMBERS, "b": 1}), r"hyperparams\['b'\] is unexpected"),
    (other_numbers({**NUMBERS, "mu": -0.5}), "block_momentum must be .* got -0.5"),
    (other_numbers({**NUMBERS, "mu": np.ones(2)}), VECTOR),
    (other_numbers({**NUMBERS, "mu": jnp.ones((2, 2))}), VECTOR),
    (
        started(make=lambda: numbered(NUMBERS, lambda numbers: sa.bmuf(numbers["mu"]))),
        "period must be .* number",
    ),
]


def averaging_if(asks):
    """Averages where a function of (params' sum, state, step) is true."""

    def sync(replica, state, step):
        total = sum(jnp.sum(x) for x in jax.tree.leaves(replica.params))

        def averaged():
            params = sa.collectives.mean(replica.params)
            return replica._replace(params=params)

        choice = asks(total, state, step)
        new = jax.lax.cond(choice, averaged, lambda: replica)
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
        less = jax.lax.cond(
            asks(batch["x"]), sa.collectives.mean, jnp.zeros_like, value
        )
        return value - less

    return loss


def lone(strategy, backend="vmap"):
    return started(strategy=strategy, backend=backend)


LARGE = averaging_if(lambda total, state, step: total > 1)
BRANCH = "a branch that depends on one worker's data contains .* .psum.*decided"
OF_LONE_BRANCHES = [
    (lone(LARGE), BRANCH),
    (lone(averaging_if(lambda total, state, step: state["sum"] > 1)), BRANCH),
    (lone(averaging_if(lambda *_: sa.collectives.index() == 0), "auto"), BRANCH),
    (lone(sa.every(LARGE, 4), "auto"), BRANCH),
    (lone(sa.Strategy(sync=looping_mean)), BRANCH.replace("branch", "loop")),
    (lone(sa.Strategy(sync=by_own_loss, sees_loss=True)), BRANCH),
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
    trainer, state = plain_trainer(), plain_state()
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
    ("before", "after", "message"),
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
def test_trees_that_differ_name_the_first_place(before, after, message):
    assert checks.unlike("tree", before, after) == message


def test_an_error_of_a_loss_without_buffers_tells_of_them():
    with pytest.raises(ValueError) as error:
        normed(())
    called, hint, *_ = error.value.__notes__
    assert called.endswith("a State, batch['x'] (6, 6), batch['y'] (6, 1)")
    assert hint.startswith("this loss got no buffers")


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
    ("strategy", "untrained"),
    [
        (sa.bmuf(6), [3]),
        (sa.model_averaging(8), []),  # the mean has all steps in it
        (PHASES, []),
    ],
    ids=["bmuf", "mean", "phases"],
)
def test_an_untrained_center_is_warned_of_once(strategy, untrained):
    trainer = make_trainer(strategy, backend="vmap")
    state, three = trainer.init(PARAMS), jax.tree.map(lambda x: x[:3], BATCHES)
    for steps in (0, 3, 6):
        if steps:
            state, _ = trainer.run(state, three)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.center(state)
            trainer.evaluate(state, three)
        told = f"no sync came in these {steps} local steps: the center, the model to"
        texts = [str(x.message)[: len(told)] for x in caught]
        assert texts == [told] * (steps in untrained)
        assert all(x.filename == __file__ for x in caught)


def test_buffers_that_no_loss_sees_are_warned_of():
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
    held = trainer.to_host(state)
    for again in (state, trainer.from_host(held)):
        with pytest.raises(ValueError, match="got 214748365"):
            trainer.run(again, BATCHES)
    with pytest.raises(ValueError, match="got 2147483648"):
        trainer.from_host(held._replace(step=np.int64(2**31)))
