"""Requests that the engine refuses, and its messages."""

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


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


LINEAR = nnx.Linear(6, 1, rngs=nnx.Rngs(0))
KEY = jax.random.PRNGKey(0)
STATISTICS = {"norm": {"mean": np.zeros(1, np.float32)}}
PARAMS = make_params()


def refuses(message, call):
    """In one line, whose text a pattern finds."""
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def with_step(leaf):
    return {"layers": [{"w": np.zeros(3)}, {"step": leaf}]}


STEP = r"^params\['layers'\]\[1\]\['step'\] is.* {}.*belongs in buffers"


@pytest.mark.parametrize(
    ("params", "buffers", "message"),
    [
        (with_step(np.int32(3)), (), STEP.format("of dtype int32")),
        (with_step(np.zeros(3, bool)), (), STEP.format("of dtype bool")),
        (with_step(jax.random.key(0)), (), STEP.format("of dtype key<fry>")),
        (with_step("text"), (), STEP.format("str")),
        (with_step(plain_loss), (), STEP.format("function")),
        ({"w": 1.5}, (), r"params\['w'\] is float.*asarray\(1\.5\)$"),
        (Normed, (), r"^params is .* an object of this class, Normed\(…\)$"),
        ({}, (), "params hold no arrays"),
        *(
            (
                PARAMS,
                {"rng": key},
                r"buffers\['rng'\] is uint32\[2\].*jax\.random\.wrap_key_data",
            )
            for key in (KEY, np.asarray(KEY))
        ),
        (
            nnx.state(Normed(nnx.Rngs(0)), nnx.Any(nnx.Param, nnx.BatchStat)),
            (),
            r"params\['norm'\]\['mean'\] is a BatchStat, which is not trained: split",
        ),
        (
            nnx.Sequential(LINEAR, nnx.BatchNorm(1, rngs=nnx.Rngs(0))),
            (),
            r"is a BatchStat, which is not trained: .* by nnx.split\(model, nnx.Param",
        ),
        (
            {"params": PARAMS, "batch_stats": STATISTICS},
            (),
            r"batch_stats'\] is not trained: pass variables.pop\('params'\) as",
        ),
        (
            eqx.nn.MLP(2, 2, 8, 1, key=jax.random.key(0)),
            (),
            r"params\.activation is .* eqx\.partition\(",
        ),
        (
            nnx.Dropout(0.5, rngs=nnx.Rngs(0)),
            (),
            r"\.count.* nnx\.split\(model, nnx\.Param",
        ),
    ],
    ids=[
        *("integer", "boolean", "key", "text", "function", "float", "class", "none"),
        *("untyped key", "untyped key of numpy", "nnx state", "nnx module", "linen"),
        *("equinox", "nnx"),
    ],
)
def test_params_or_buffers_that_cannot_be_are_refused_by_leaf(params, buffers, message):
    refuses(message, lambda: plain_trainer().init(params, buffers))


def test_what_cannot_be_an_untyped_key_is_a_buffer():
    two = np.zeros(2, np.uint32)
    counts = {"rng": {"count": two}, "seen": two.astype(np.int32), "one": two[:1]}
    state = plain_trainer().init(PARAMS, counts)
    assert not any(np.any(x) for x in jax.tree.leaves(state.replica.buffers))


@pytest.mark.parametrize(
    ("collective", "ours"),
    [
        (lambda x: jax.lax.all_gather(x, sa.WORKERS), "all_gather.*gather"),
        (lambda x: jax.lax.psum_scatter(x, sa.WORKERS), "psum_scatter.*mean"),
        (lambda x: jax.lax.ppermute(x, sa.WORKERS, [(0, 1)]), "ppermute.*shift"),
    ],
)
def test_jaxs_own_collectives_over_workers_are_told_ours(collective, ours):
    def loss(params, batch):
        return plain_loss(params, batch) + jnp.mean(collective(batch["x"][:4]))

    trainer = make_trainer(backend="vmap", loss=sa.stateless(loss))
    name, _, other = ours.partition(".*")
    with pytest.raises(ValueError, match=rf"^jax\.lax\.{name} .*collectives\.{other}$"):
        trainer.run(trainer.init(PARAMS), BATCHES)


def test_an_assertion_of_the_users_stays_theirs():
    def loss(params, batch):
        assert not params, "mine"

    with pytest.raises(AssertionError, match=r"^mine"):
        trainer = make_trainer(backend="vmap", loss=sa.stateless(loss))
        trainer.run(trainer.init(PARAMS), BATCHES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"workers": 2.5}, "workers must be a whole number of at least 1, got 2.5"),
        ({"backend": "pmpa"}, "unknown backend 'pmpa'; did you mean 'pmap'"),
        ({"devices": [5]}, "device 5 does not exist"),
        ({"devices": [-1]}, "a device must be a whole number of at least 0, got -1"),
        ({"devices": [0, 0]}, "devices must be distinct"),
        ({"devices": []}, "at least one"),
        ({"devices": 2}, "devices must be a list of indices or devices, got 2"),
        ({"devices": [0, 1, 2]}, "4 workers do not divide over 3 devices"),
        ({"backend": "vmap", "devices": [0, 1]}, "'vmap' runs on one device, got 2"),
        ({"strategy": sa.bmuf}, r"expected a Strategy, .*call it: bmuf\(\)"),
        ({"strategy": "bmuf"}, r"got 'bmuf' \(.* is an object: syncalgos.bmuf\(\)\)"),
        ({"strategy": optax.sgd(0.1)}, "an optimizer. check the order of the"),
    ],
)
def test_bad_layout_is_refused(change, message):
    refuses(message, lambda: make_trainer(**change))


@pytest.mark.parametrize(
    ("optimizer", "hint"),
    [
        (optax.sgd, r"\(call it: sgd\(…\)\)$"),
        (optax.linear_schedule(1, 0, 9), r"\(a schedule is .*sgd\(schedule\)\)$"),
        ("sgd", r"\(an optimizer is an object: optax.sgd\(…\)\)$"),
        (nnx.Optimizer(LINEAR, optax.sgd(1.0), wrt=nnx.Param), r"\(pass its .tx\)$"),
    ],
    ids=["factory", "schedule", "name", "nnx"],
)
def test_optimizer_of_another_kind_is_refused(optimizer, hint):
    refuses(
        f"optimizer must be an optax optimizer, got .{{,60}} {hint}",
        lambda: sa.DataParallel(sa.stateless(plain_loss), optimizer, sa.sync_sgd()),
    )


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.contrib.schedule_free_sgd(0.1), "schedule_free evaluates another model"),
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), r"with .* syncalgos.lookahead\(\)"),
        (optax.lbfgs(), "a line search needs the loss at other params"),
        (
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9)),
            "a line search needs the loss",
        ),
        (
            optax.apply_if_finite(optax.contrib.schedule_free_adamw(), 3),
            "docs/own-loop.md",
        ),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "sam moves params to"),
        (optax.contrib.sophia(0.1), "an estimate of the Hessian needs the loss"),
    ],
    ids=[
        *("schedule_free", "lookahead", "lbfgs", "backtracking", "inside another"),
        *("sam", "sophia"),
    ],
)
def test_an_optimizer_that_no_worker_can_run_is_refused(optimizer, message):
    trainer = sa.DataParallel(
        sa.stateless(plain_loss), optimizer, sa.sync_sgd(), workers=2
    )
    refuses(f"^optimizer: .*{message}", lambda: trainer.init(PARAMS))


Y_LEADS = r"batches\['y'\] has leading axes"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ({"x": X[ROWS], "y": Y[ROWS[:6]]}, rf"{Y_LEADS} \(6, 24\), but"),
        ({"x": X[ROWS], "y": Y[ROWS[:, :8]]}, rf"{Y_LEADS} \(12, 8\)"),
        ({"x": X[ROWS], "y": np.zeros(12)}, r"must have axes \(steps, global_batch"),
        ({"x": X[ROWS[:, :0]]}, "global batch of 0"),
        ({"x": X[ROWS[:0]]}, "batches hold no steps"),
        ({}, "batches hold no arrays"),
        ({"y": np.zeros(12)}, r"got shape \(12,\); for a single step, pass x\[None\]$"),
        (iter(X), r"batches is .*iterator, not an array: stack the batches"),
        (X[ROWS].tolist(), r"batches\[0\].* is float: convert lists to"),
    ],
)
def test_bad_batches_are_refused(batches, message):
    trainer = plain_trainer()
    state = trainer.init(PARAMS)
    for method in (trainer.run, trainer.evaluate):
        with pytest.raises(ValueError, match=message):
            method(state, batches)


@pytest.mark.parametrize("batch", [X[ROWS[0]], X[ROWS[:, :10]], X[ROWS[:, :2]]])
def test_a_batch_that_the_workers_do_not_divide_trains_nobody(batch):
    trainer = plain_trainer()
    with pytest.raises(ValueError, match=r"divide over 4 workers: .* step, pass x\["):
        trainer.run(trainer.init(PARAMS), {"x": batch})


TEN = {"x": X[ROWS[0, :10]]}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (TEN, r"batch of 10 does not divide .* such as 8 or 12; .* steps, call run$"),
        (X[0].tolist(), r"^batch\[0\] is float: convert lists to"),
        (
            {"x": np.float32(0)},
            r"batches\['x'\] must have axes \(steps, global_batch",
        ),
    ],
)
def test_a_bad_batch_of_one_step_is_refused(batch, message):
    trainer = plain_trainer()
    with pytest.raises(ValueError, match=message):
        trainer.step(trainer.init(PARAMS), batch)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS.astype(float), "must be integer row numbers"),
        (ROWS[..., None], "must be integer row numbers"),
        (ROWS + 100, "rows must be 0 to 199"),
        (ROWS - 1, "rows must be 0 to 199, got -1"),
        (jnp.asarray(ROWS) + 100, "rows must be 0 to 199"),
    ],
)
def test_bad_rows_are_refused(rows, message):
    trainer = plain_trainer()
    state, data = trainer.init(PARAMS), trainer.place(DATA)
    with pytest.raises(ValueError, match=message):
        trainer.run(state, rows, data)


def test_data_whose_leaves_disagree_is_refused():
    with pytest.raises(ValueError, match=r"data\['y'\] has leading axes \(10,\)"):
        plain_trainer().place({"x": X, "y": Y[:10]})


def cut(x):
    return x[:1]


def widen(x):
    return x.astype(jnp.int32)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            sa.Strategy(
                sync=lambda r, s, t: (r._replace(params={**r.params, "w": 0.0}), s)
            ),
            r"sync changes replica.params\['w'\] from float32\[6,1\] to float32\[\]",
        ),
        (
            sa.Strategy(sync=lambda r, s, t: (jax.tree.map(widen, r), s)),
            r"sync changes replica.params\['b'\] from float32\[1\] to int32\[1\]",
        ),
        (
            sa.Strategy(reduce=lambda g, r, s, t: (jax.tree.map(cut, g), s)),
            r"reduce changes grads\['w'\] from float32\[6,1\] to float32\[1,1\]",
        ),
        (
            sa.Strategy(
                init=lambda p: {"n": jnp.int32(0)}, sync=lambda r, s, t: (r, ())
            ),
            r"sync changes the structure of state: state is \(\), not dict",
        ),
        (
            sa.Strategy(
                init=lambda p: {"n": jnp.int32(0)},
                sync=lambda r, s, t: (r, {"n": s["n"] * 0.5}),
            ),
            r"sync changes state\['n'\] from int32\[\] to float32\[\]",
        ),
        (
            sa.Strategy(sync=lambda r, s, t: r),
            r"sync must return \(replica, state\), got Replica",
        ),
        (
            sa.Strategy(center=lambda p, s: p["w"]),
            "center changes the structure of params: params is array, not dict",
        ),
    ],
)
@pytest.mark.parametrize("period", [1, 4])
def test_strategy_that_changes_shapes_is_refused_by_leaf(strategy, message, period):
    trainer = make_trainer(sa.every(strategy, period))
    refuses(message, lambda: trainer.init(PARAMS))


PYTHON_IF = r"test_engine_errors.py:\d+: `.*step .*4.*` needs .*use every\(…, schedule"


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (sa.Strategy(sync=lambda r, s, step: (r if step % 4 else None, s)), PYTHON_IF),
        (sa.when(sa.average(), lambda step: step + 1 in (4, 8)), PYTHON_IF),
        (
            sa.masked(sa.bmuf(2), {"w": True}),
            r"mask must be a tree like params: masked: mask\['b'\] is missing",
        ),
        (
            sa.masked(sa.bmuf(2), {"w": 1, "b": 1, "c": 1}),
            r"masked: mask\['c'\] is unexpected",
        ),
        (
            sa.masked(sa.bmuf(2), {"w": {"x": True}, "b": True}),
            r"masked: mask\['w'\] is dict, not array",
        ),
        (sa.bmuf(axis="batch"), r"strategy is syncalgos\.WORKERS"),
        (sa.every(sa.reset(optax.adam(0.1)), 2), "the same inner optimizer"),
    ],
    ids=["if", "if in when", "lacking", "new", "deeper", "axis", "reset"],
)
def test_strategy_that_cannot_train_these_params_is_refused(strategy, message):
    refuses(message, lambda: make_trainer(strategy).init(PARAMS))


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda p, b, batch: 0.0,
            r"function of \(params, batch\), of \(params, batch, ",
        ),
        (3, r"function of \(params, batch\), of .* or of .*, got 3"),
        (lambda p, key, batch: 0.0, r"of \(params, batch, key\)"),
        (
            lambda p, b, batch, key: (0.0, (b, {"microbatch_weight": batch["y"]})),
            r"microbatch_weight' must be a scalar, got shape \(6, 1\)",
        ),
        (lambda p, b, batch, key: plain_loss(p, batch), "loss must return"),
        (
            lambda p, b, batch, key: (plain_loss(p, batch), (b, 3.0)),
            "loss must return .* dict of metrics",
        ),
        (
            lambda p, b, batch, key: (batch["x"] @ p["w"], (b, {})),
            r"loss must be a scalar, the mean over its batch, got shape \(6, 1\)",
        ),
        (
            lambda p, batch: (plain_loss(p, batch), {}),
            "must return a scalar, got 2 values: to return metrics, write",
        ),
        (
            sa.per_example(lambda p, b, batch, key: plain_loss(p, batch)),
            r"per_example: the function must return \(values, buffers\), got ",
        ),
        (
            sa.per_example(lambda p, b, batch, key: (plain_loss(p, batch), b)),
            r"per_example: values must be a dict, such as \{'loss': ",
        ),
        (
            lambda p, b, batch, key: (plain_loss(p, batch), ({"new": 0.0}, {})),
            r"the loss changes the structure of buffers: buffers is dict, not \(\)",
        ),
    ],
)
def test_loss_of_another_form_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        trainer = make_trainer(loss=loss)
        trainer.run(trainer.init(PARAMS), BATCHES)


def test_what_is_no_state_is_refused_and_both_results_of_run_are_named():
    trainer = plain_trainer()
    both = trainer.run(trainer.init(PARAMS), BATCHES)
    for use in (
        lambda x: trainer.run(x, BATCHES),
        *(trainer.center, trainer.divergence, trainer.to_host),
        lambda x: trainer.communication(x, steps=1),
    ):
        for given, told in (
            (both, "got a tuple; unpack the result of run: state, me"),
            (PARAMS, r"state must be a TrainState, got \{'w'"),
        ):
            with pytest.raises(ValueError, match=told):
                use(given)


def test_a_trainer_inside_jit_is_refused():
    trainer = plain_trainer()
    state = trainer.init(PARAMS)
    for run in (trainer.run, lambda _, batches: trainer.run(state, batches)):
        with pytest.raises(ValueError, match="call it outside jax"):
            jax.jit(run)(state, BATCHES)


def test_params_are_said_to_be_where_they_are():
    trainer = plain_trainer()
    state = trainer.init(PARAMS)
    with pytest.raises(AttributeError, match=r"center\(state\).params for one plain"):
        _ = state.params  # pyright: ignore
    with pytest.raises(TypeError, match=r"use .params\['w'\]"):
        trainer.center(state)["w"]
    assert not hasattr(state, "__jax_array__")
    assert trainer.center(state)[0]["w"].shape == (6, 1)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "message"),
    [
        (
            sa.slowmo(3, learning_rate=0.1),
            optax.sgd(0.05, momentum=0.9),
            r"another strategy: (state|held).sync is BMUFState, not SlowMoState$",
        ),
        (
            sa.sync_sgd(),
            optax.sgd(0.05, momentum=0.9),
            r"another strategy: (state|held).sync is BMUFState, not EmptyState$",
        ),
        (
            sa.bmuf(3),
            optax.adam(0.1),
            r"optimizer: (state|held).replica.opt_state\[0\] is TraceState, not Scale",
        ),
    ],
    ids=["slowmo", "sync_sgd", "adam"],
)
def test_state_of_another_trainer_is_refused_by_name(strategy, optimizer, message):
    first = plain_trainer()
    state = first.init(PARAMS)
    other = sa.DataParallel(sa.stateless(plain_loss), optimizer, strategy, workers=4)
    for use in (
        *(other.center, lambda x: other.run(x, BATCHES)),
        lambda x: other.from_host(first.to_host(x)),
    ):
        with pytest.raises(ValueError, match=message):
            use(state)
    # One of the same kind is taken.
    make_trainer().run(state, BATCHES)


class Settings(NamedTuple):
    rate: object
    rest: object = ()


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
        (
            {"a": eqx.nn.Linear(1, 1, key=jax.random.key(0))},
            {"a": eqx.nn.Linear(2, 1, key=jax.random.key(0))},
            "tree['a'], a Linear, has other static fields",
        ),
        ({"a": 1}, {"a": 2.0}, ""),
    ],
)
def test_trees_that_differ_name_the_first_place(before, after, message):
    assert checks.unlike("tree", before, after) == message


GRAPH, OF_NNX, BUFFERS = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)


def normed_loss(params, buffers, batch, key, kept=nnx.BatchStat):
    model = nnx.merge(GRAPH, params, buffers)
    value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return value, (nnx.state(model, kept), {})


def test_a_loss_that_drops_buffers_names_the_first():
    trainer = make_trainer(loss=normed_loss)
    with pytest.raises(
        ValueError, match=r"of buffers: buffers\['dropout'\] is missing"
    ):
        trainer.run(trainer.init(OF_NNX, BUFFERS), BATCHES)


def test_an_error_of_a_loss_without_buffers_tells_of_them():
    trainer = make_trainer(loss=normed_loss)
    with pytest.raises(ValueError) as error:
        trainer.run(trainer.init(OF_NNX), BATCHES)
    called, hint, *_ = error.value.__notes__
    assert called.endswith("a State, batch['x'] (6, 6), batch['y'] (6, 1)")
    assert hint.startswith("this loss got no buffers")


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


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        (averaging_if(lambda total, state, step: total > 1), "branch"),
        (averaging_if(lambda total, state, step: state["sum"] > 1), "branch"),
        (averaging_if(lambda *_: sa.collectives.index() == 0), "branch"),
        (sa.every(averaging_if(lambda total, state, step: total > 1), 4), "branch"),
        (sa.Strategy(sync=looping_mean), "loop"),
    ],
    ids=["params", "state", "index", "inside every", "loop"],
)
@pytest.mark.parametrize("backend", ["vmap", "auto"])
def test_a_collective_that_only_some_workers_reach_is_refused(strategy, what, backend):
    message = f"a {what} that depends on one worker's data contains .* .psum.*decided"
    refuses(message, lambda: make_trainer(strategy, backend=backend).init(PARAMS))


@pytest.mark.parametrize(
    "strategy",
    [
        averaging_if(lambda total, state, step: step % 2 == 1),
        averaging_if(lambda total, state, step: state["count"] % 2 == 1),
        averaging_if(lambda total, *_: sa.collectives.mean(total) > 1),
        sa.chain(sa.sync_sgd(), averaging_if(lambda total, state, step: total > 1)),
        sa.chain(
            sa.model_averaging(2),
            sa.every(averaging_if(lambda total, state, step: total > 1), 2),
        ),
    ],
    ids=["step", "counter", "agreed number", "equal replicas", "agreed model"],
)
def test_a_branch_that_all_workers_take_may_hold_a_collective(strategy):
    assert make_trainer(strategy).init(PARAMS).step == 0


def normalizing_if(asks):
    """A loss less the mean of all workers', where a function of the batch is true."""

    def loss(params, batch):
        value = jnp.mean((batch["x"] @ params["w"]) ** 2)
        less = jax.lax.cond(
            asks(batch["x"]), sa.collectives.mean, jnp.zeros_like, value
        )
        return value - less

    return loss


@pytest.mark.parametrize("backend", ["auto", "shard_map"])
def test_a_loss_whose_collective_only_some_workers_reach_is_refused(backend):
    loss = normalizing_if(lambda x: x.sum() > 1)
    trainer = make_trainer(loss=loss, backend=backend)
    state = trainer.init(PARAMS)
    message = "a branch that depends on one worker's data contains .* .psum.*decided"
    refuses(message, lambda: trainer.run(state, BATCHES))


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
    trainer = make_trainer(strategy)
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sync": lambda replica, state: 0}, r"sync .*with \(replica, state, step\)"),
        (
            {"init": lambda replica, state, step: 0},
            r"init .*called with \(params\), but",
        ),
        ({"center": lambda params: params}, r"takes \(params\): too many positional"),
        (
            {"reduce": None},
            r"reduce .*function of \(grads, replica, state, step\), got",
        ),
    ],
)
def test_functions_of_other_arguments_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        sa.every(sa.Strategy(**fields), 2)


def test_functions_that_tell_no_signature_are_taken():
    assert isinstance(sa.every(sa.Strategy(init=iter), 2), sa.Strategy)


def test_steps_that_would_wrap_are_refused():
    """In int32 they would go on from -2³¹, and `until` would begin anew."""
    trainer = make_trainer(sa.bmuf(2))
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
