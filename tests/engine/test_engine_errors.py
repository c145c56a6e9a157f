"""Requests that the engine refuses, and its messages."""

import re
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
)

import syncalgos
from syncalgos import DataParallel, Strategy, checks, every, per_example, stateless

LINEAR = nnx.Linear(6, 1, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("leaf", "kind"),
    [
        (np.int32(3), "of dtype int32"),
        (np.zeros(3, bool), "of dtype bool"),
        (jax.random.key(0), "of dtype key<fry>"),
        ("text", "str"),
        (plain_loss, "function"),
    ],
)
def test_leaf_of_params_that_is_no_float_array_is_named(leaf, kind):
    params = {"layers": [{"w": np.zeros(3)}, {"step": leaf}]}
    with pytest.raises(ValueError, match="belongs in buffers") as error:
        make_trainer().init(params)
    assert "params['layers'][1]['step'] is" in str(error.value)
    assert kind in str(error.value)


def test_a_python_float_in_params_is_told_to_be_an_array():
    with pytest.raises(ValueError, match=r"params\['w'\] is float.*asarray\(1\.5\)$"):
        make_trainer().init({"w": 1.5})


@pytest.mark.parametrize("is_numpy", [False, True])
def test_an_untyped_key_in_buffers_is_refused(is_numpy):
    key = jax.random.PRNGKey(0)
    buffers = {"rng": np.asarray(key) if is_numpy else key}
    message = r"buffers\['rng'\] is uint32\[2\].*jax\.random\.wrap_key_data"
    with pytest.raises(ValueError, match=message):
        make_trainer().init(make_params(), buffers)


def test_what_cannot_be_an_untyped_key_is_a_buffer():
    two = np.zeros(2, np.uint32)
    counts = {"rng": {"count": two}, "seen": two.astype(np.int32), "one": two[:1]}
    state = make_trainer().init(make_params(), counts)
    assert not any(np.any(x) for x in jax.tree.leaves(state.replica.buffers))


@pytest.mark.parametrize(
    ("collective", "ours"),
    [
        (lambda x: jax.lax.all_gather(x, syncalgos.WORKERS), "all_gather.*gather"),
        (lambda x: jax.lax.psum_scatter(x, syncalgos.WORKERS), "psum_scatter.*mean"),
        (lambda x: jax.lax.ppermute(x, syncalgos.WORKERS, [(0, 1)]), "ppermute.*shift"),
    ],
)
def test_jaxs_own_collectives_over_workers_are_told_ours(collective, ours):
    def loss(params, batch):
        return plain_loss(params, batch) + jnp.mean(collective(batch["x"][:4]))

    trainer = make_trainer(backend="vmap", loss=stateless(loss))
    name, _, other = ours.partition(".*")
    with pytest.raises(ValueError, match=rf"^jax\.lax\.{name} .*collectives\.{other}$"):
        trainer.run(trainer.init(make_params()), BATCHES)


def test_an_assertion_of_the_users_stays_theirs():
    def loss(params, batch):
        assert not params, "mine"

    with pytest.raises(AssertionError, match=r"^mine"):
        trainer = make_trainer(backend="vmap", loss=stateless(loss))
        trainer.run(trainer.init(make_params()), BATCHES)


def test_empty_params_are_refused():
    with pytest.raises(ValueError, match="params hold no arrays"):
        make_trainer().init({})


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
        ({"strategy": syncalgos.bmuf}, r"expected a Strategy, .*call it: bmuf\(\)"),
        ({"strategy": "bmuf"}, r"got 'bmuf' \(.* is an object: syncalgos.bmuf\(\)\)"),
        ({"strategy": optax.sgd(0.1)}, "an optimizer. it comes before the strategy"),
    ],
)
def test_bad_layout_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_trainer(**change)


@pytest.mark.parametrize(
    ("optimizer", "hint"),
    [
        (optax.sgd, r"\(call it: sgd\(…\)\)$"),
        ("sgd", r"\(an optimizer is an object: optax.sgd\(…\)\)$"),
        (nnx.Optimizer(LINEAR, optax.sgd(1.0), wrt=nnx.Param), r"\(pass its .tx\)$"),
    ],
    ids=["factory", "name", "nnx"],
)
def test_optimizer_of_another_kind_is_refused(optimizer, hint):
    message = "optimizer must be an optax optimizer, got .{,60} "
    with pytest.raises(ValueError, match=message + hint) as refused:
        DataParallel(stateless(plain_loss), optimizer, syncalgos.sync_sgd())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.contrib.schedule_free_sgd(0.1), "schedule_free evaluates another model"),
        (optax.lookahead(optax.sgd(0.1), 5, 0.5), r"syncalgos.lookahead\(\) as the"),
        (optax.lbfgs(), "a line search asks for the loss at other params"),
        (
            optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9)),
            "a line search asks for the loss",
        ),
        (
            optax.apply_if_finite(optax.contrib.schedule_free_adamw(), 3),
            "docs/own-loop.md",
        ),
        (optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.1)), "sam trains at points"),
        (optax.contrib.sophia(0.1), "an estimate of the Hessian asks for the loss"),
    ],
    ids=[
        *("schedule_free", "lookahead", "lbfgs", "backtracking", "inside another"),
        *("sam", "sophia"),
    ],
)
def test_an_optimizer_that_no_worker_can_run_is_refused(optimizer, message):
    trainer = DataParallel(stateless(plain_loss), optimizer, syncalgos.sync_sgd(), 2)
    with pytest.raises(ValueError, match=f"^optimizer: .*{message}") as refused:
        trainer.init(make_params())
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ({"x": X[ROWS], "y": Y[ROWS[:6]]}, r"batches\['y'\] leads with \(6, 24\), but"),
        ({"x": X[ROWS], "y": Y[ROWS[:, :8]]}, r"batches\['y'\] leads with \(12, 8\)"),
        ({"x": X[ROWS], "y": np.zeros(12)}, r"must lead with \(steps, global_batch\)"),
        ({"x": X[ROWS[:, :10]]}, "global batch of 10 does not divide over 4 workers"),
        ({"x": X[ROWS[:, :2]]}, "use a multiple of 4, such as 4;"),
        ({"x": X[ROWS[:, :0]]}, "global batch of 0"),
        ({"x": X[ROWS[:0]]}, "batches hold no steps"),
        ({}, "batches hold no arrays"),
        ({"x": X[ROWS[0]]}, r"not divide .*; (one step\? x\[None\]|what is left)"),
        ({"y": np.zeros(12)}, r"got \(12,\); one step\? x\[None\]$"),
        (iter(X), r"batches is .*iterator, not an array: stack some steps of it"),
        (X[ROWS].tolist(), r"batches\[0\].* is float: make arrays of lists"),
    ],
)
def test_bad_batches_are_refused(batches, message):
    trainer = make_trainer()
    state = trainer.init(make_params())
    for method in (trainer.run, trainer.evaluate):
        with pytest.raises(ValueError, match=message):
            method(state, batches)


def test_a_rest_that_does_not_fill_a_batch_is_told_where_to_go():
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"left over: drop it, or .*center\(state\)$"):
        trainer.evaluate(trainer.init(make_params()), {"x": X[ROWS[:, :10]]})


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (ROWS.astype(float), "must be integer rows"),
        (ROWS[..., None], "must be integer rows"),
        (ROWS + 100, "rows must be 0 to 199"),
        (ROWS - 1, "rows must be 0 to 199, got -1"),
        (jnp.asarray(ROWS) + 100, "rows must be 0 to 199"),
    ],
)
def test_bad_rows_are_refused(rows, message):
    trainer = make_trainer()
    state, data = trainer.init(make_params()), trainer.place(DATA)
    with pytest.raises(ValueError, match=message):
        trainer.run(state, rows, data)


def test_data_whose_leaves_disagree_is_refused():
    with pytest.raises(ValueError, match=r"data\['y'\] leads with \(10,\)"):
        make_trainer().place({"x": X, "y": Y[:10]})


def cut(x):
    return x[:1]


def widen(x):
    return x.astype(jnp.int32)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (
            Strategy(
                sync=lambda r, s, t: (r._replace(params={**r.params, "w": 0.0}), s)
            ),
            r"sync changes replica.params\['w'\] from float32\[6,1\] to float32\[\]",
        ),
        (
            Strategy(sync=lambda r, s, t: (jax.tree.map(widen, r), s)),
            r"sync changes replica.params\['b'\] from float32\[1\] to int32\[1\]",
        ),
        (
            Strategy(reduce=lambda g, r, s, t: (jax.tree.map(cut, g), s)),
            r"reduce changes grads\['w'\] from float32\[6,1\] to float32\[1,1\]",
        ),
        (
            Strategy(init=lambda p: {"n": jnp.int32(0)}, sync=lambda r, s, t: (r, ())),
            r"sync changes the structure of state: state is \(\), not dict",
        ),
        (
            Strategy(
                init=lambda p: {"n": jnp.int32(0)},
                sync=lambda r, s, t: (r, {"n": s["n"] * 0.5}),
            ),
            r"sync changes state\['n'\] from int32\[\] to float32\[\]",
        ),
        (
            Strategy(sync=lambda r, s, t: r),
            r"sync must return \(replica, state\), got Replica",
        ),
        (
            Strategy(center=lambda p, s: p["w"]),
            "center changes the structure of params: params is array, not dict",
        ),
    ],
)
@pytest.mark.parametrize("period", [1, 4])
def test_strategy_that_changes_shapes_is_refused_by_leaf(strategy, message, period):
    trainer = make_trainer(every(period, strategy))
    with pytest.raises(ValueError, match=message):
        trainer.init(make_params())


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (plain_loss, "function of .*stateless lifts a loss"),
        (3, "function of .*stateless lifts a loss"),
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
            stateless(lambda p, batch: (plain_loss(p, batch), {})),
            "stateless: the loss returned 2 values, not a scalar; with metrics write",
        ),
        (
            per_example(lambda p, b, batch, key: plain_loss(p, batch)),
            r"per_example: the function must return \(values, buffers\), got ",
        ),
        (
            per_example(lambda p, b, batch, key: (plain_loss(p, batch), b)),
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
        trainer.run(trainer.init(make_params()), BATCHES)


def test_state_of_another_kind_is_refused():
    trainer = make_trainer()
    for use in (trainer.center, lambda x: trainer.run(x, BATCHES)):
        with pytest.raises(ValueError, match=r"state must be a TrainState, got \{'w'"):
            use(make_params())


def test_both_results_of_run_taken_for_the_state_are_named():
    trainer = make_trainer()
    both = trainer.run(trainer.init(make_params()), BATCHES)
    for use in (
        lambda x: trainer.run(x, BATCHES),
        *(trainer.center, trainer.divergence, trainer.to_host),
        lambda x: trainer.communication(x, steps=1),
    ):
        with pytest.raises(ValueError, match="got a tuple: run returns two: state, me"):
            use(both)


def test_a_trainer_inside_jit_is_refused():
    trainer = make_trainer()
    state = trainer.init(make_params())
    for run in (trainer.run, lambda _, batches: trainer.run(state, batches)):
        with pytest.raises(ValueError, match="call it without jax"):
            jax.jit(run)(state, BATCHES)


def test_params_are_said_to_be_where_they_are():
    trainer = make_trainer()
    state = trainer.init(make_params())
    with pytest.raises(AttributeError, match=r"center\(state\).params is of one plain"):
        _ = state.params  # pyright: ignore
    with pytest.raises(TypeError, match=r"write .params\['w'\]"):
        trainer.center(state)["w"]
    assert not hasattr(state, "__jax_array__")
    assert trainer.center(state)[0]["w"].shape == (6, 1)


@pytest.mark.parametrize(
    ("strategy", "optimizer", "message"),
    [
        (
            syncalgos.slowmo(3, learning_rate=0.1),
            optax.sgd(0.05, momentum=0.9),
            r"another strategy: (state|held).sync is BMUFState, not SlowMoState$",
        ),
        (
            syncalgos.sync_sgd(),
            optax.sgd(0.05, momentum=0.9),
            r"another strategy: (state|held).sync is BMUFState, not EmptyState$",
        ),
        (
            syncalgos.bmuf(3),
            optax.adam(0.1),
            r"optimizer: (state|held).replica.opt_state\[0\] is TraceState, not Scale",
        ),
    ],
    ids=["slowmo", "sync_sgd", "adam"],
)
def test_state_of_another_trainer_is_refused_by_name(strategy, optimizer, message):
    first = make_trainer()
    state = first.init(make_params())
    other = DataParallel(stateless(plain_loss), optimizer, strategy, 4)
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
        ({"a": 1}, {"a": 1, "b": 2}, "tree['b'] is new"),
        ({"a": [1, 2]}, {"a": [1]}, "tree['a'][1] is missing"),
        ({"a": [1, 2]}, {"a": (1, 2)}, "tree['a'] is tuple, not list"),
        ({"a": 1}, {"a": None}, "tree['a'] is None, not array"),
        ({"a": ()}, {"a": 1}, "tree['a'] is array, not ()"),
        (Settings(1, [2]), Settings(1, [2, 3]), "tree.rest[1] is new"),
        (
            {"a": eqx.nn.Linear(1, 1, key=jax.random.key(0))},
            {"a": eqx.nn.Linear(2, 1, key=jax.random.key(0))},
            "tree['a'] is another Linear: its static fields differ",
        ),
        ({"a": 1}, {"a": 2.0}, ""),
    ],
)
def test_trees_that_differ_name_the_first_place(before, after, message):
    assert checks.unlike("tree", before, after) == message


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ({"w": True}, "mask must be a tree like params: masked: mask['b'] is missing"),
        ({"w": 1, "b": 1, "c": 1}, "masked: mask['c'] is new"),
        ({"w": {"x": True}, "b": True}, "masked: mask['w'] is dict, not array"),
    ],
)
def test_a_mask_unlike_params_names_the_first_place(mask, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make_trainer(syncalgos.masked(syncalgos.bmuf(2), mask)).init(make_params())


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 1, rngs=rngs)
        self.norm = nnx.BatchNorm(1, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


STATISTICS = {"norm": {"mean": np.zeros(1, np.float32)}}


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            nnx.state(Normed(nnx.Rngs(0)), nnx.Any(nnx.Param, nnx.BatchStat)),
            r"params\['norm'\]\['mean'\] is a BatchStat, which is not trained: a mod",
        ),
        (
            nnx.Sequential(LINEAR, nnx.BatchNorm(1, rngs=nnx.Rngs(0))),
            r"is a BatchStat, which is not trained: .* by nnx.split\(model, nnx.Param",
        ),
        (
            {"params": make_params(), "batch_stats": STATISTICS},
            r"batch_stats'\] is not trained: .*params = variables.pop\('params'\)",
        ),
    ],
    ids=["nnx state", "nnx module", "linen"],
)
def test_statistics_among_params_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        make_trainer().init(params)


GRAPH, PARAMS, BUFFERS = nnx.split(Normed(nnx.Rngs(0)), nnx.Param, ...)


def normed_loss(params, buffers, batch, key, kept=nnx.BatchStat):
    model = nnx.merge(GRAPH, params, buffers, copy=True)
    value = jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    return value, (nnx.state(model, kept), {})


def test_a_loss_that_drops_buffers_names_the_first():
    trainer = make_trainer(loss=normed_loss)
    with pytest.raises(
        ValueError, match=r"of buffers: buffers\['dropout'\] is missing"
    ):
        trainer.run(trainer.init(PARAMS, BUFFERS), BATCHES)


def test_an_error_of_a_loss_without_buffers_tells_of_them():
    trainer = make_trainer(loss=normed_loss)
    with pytest.raises(ValueError) as error:
        trainer.run(trainer.init(PARAMS), BATCHES)
    assert any("this loss got no buffers" in x for x in error.value.__notes__)


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy(sync=lambda r, s, step: (r if step % 4 else None, s)),
        syncalgos.when(lambda step: step + 1 in (4, 8), syncalgos.average()),
    ],
    ids=["sync", "when"],
)
def test_a_python_if_on_the_step_is_told_of_every(strategy):
    message = r"test_engine_errors.py:\d+: `.*step .*4.*` asks .*use every\(schedule"
    with pytest.raises(ValueError, match=message) as refused:
        make_trainer(strategy).init(make_params())
    assert "\n" not in str(refused.value)


def averaging_if(asks):
    """Averages where a function of (params' sum, state, step) is true."""

    def sync(replica, state, step):
        total = sum(jnp.sum(x) for x in jax.tree.leaves(replica.params))

        def averaged():
            params = syncalgos.collectives.mean(replica.params)
            return replica._replace(params=params)

        choice = asks(total, state, step)
        new = jax.lax.cond(choice, averaged, lambda: replica)
        return new, {"count": state["count"] + 1, "sum": 0.9 * state["sum"] + total}

    def init(_):
        return {"count": jnp.int32(0), "sum": jnp.float32(0)}

    return Strategy(init, sync=sync)


def looping_mean(replica, state, step):
    """Averages a number until it is small."""
    total = sum(jnp.sum(x) for x in jax.tree.leaves(replica.params))
    jax.lax.while_loop(
        lambda x: x > 1, lambda x: syncalgos.collectives.mean(x) / 2, total
    )
    return replica, state


@pytest.mark.parametrize(
    ("strategy", "what"),
    [
        (averaging_if(lambda total, state, step: total > 1), "branch"),
        (averaging_if(lambda total, state, step: state["sum"] > 1), "branch"),
        (averaging_if(lambda *_: syncalgos.collectives.index() == 0), "branch"),
        (every(4, averaging_if(lambda total, state, step: total > 1)), "branch"),
        (Strategy(sync=looping_mean), "loop"),
    ],
    ids=["params", "state", "index", "inside every", "loop"],
)
@pytest.mark.parametrize("backend", ["vmap", "auto"])
def test_a_collective_that_only_some_workers_reach_is_refused(strategy, what, backend):
    message = f"a {what} on a worker's own data holds a collective .psum.*decided"
    with pytest.raises(ValueError, match=message):
        make_trainer(strategy, backend=backend).init(make_params())


@pytest.mark.parametrize(
    "strategy",
    [
        averaging_if(lambda total, state, step: step % 2 == 1),
        averaging_if(lambda total, state, step: state["count"] % 2 == 1),
        averaging_if(lambda total, *_: syncalgos.collectives.mean(total) > 1),
        syncalgos.chain(
            syncalgos.sync_sgd(), averaging_if(lambda total, state, step: total > 1)
        ),
        syncalgos.chain(
            syncalgos.model_averaging(2),
            every(2, averaging_if(lambda total, state, step: total > 1)),
        ),
    ],
    ids=["step", "counter", "agreed number", "equal replicas", "agreed model"],
)
def test_a_branch_that_all_workers_take_may_hold_a_collective(strategy):
    trainer = make_trainer(strategy)
    state, _ = trainer.run(trainer.init(make_params()), BATCHES)
    assert np.isfinite(np.asarray(state.replica.params["w"])).all()


@pytest.mark.parametrize(
    ("strategy", "steps", "warned"),
    [
        (syncalgos.bmuf(8), 6, True),
        (syncalgos.bmuf(6), 6, False),
        (syncalgos.model_averaging(8), 6, False),  # the mean has all steps in it
        (
            syncalgos.chain(
                syncalgos.until(9, syncalgos.sync_sgd()),
                syncalgos.after(9, syncalgos.bmuf(3)),
            ),
            6,
            False,
        ),
        (syncalgos.bmuf(8), 0, False),
    ],
    ids=["before a sync", "at a sync", "mean", "phase", "no steps"],
)
def test_an_untrained_center_is_warned_of_once(strategy, steps, warned):
    trainer = make_trainer(strategy)
    state = trainer.init(make_params())
    if steps:
        state, _ = trainer.run(state, jax.tree.map(lambda x: x[:steps], BATCHES))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.center(state)
        trainer.evaluate(state, BATCHES)
    texts = [str(x.message) for x in caught]
    told = f"no sync came in these {steps} local steps: the center, which is evaluated"
    assert [x[: len(told)] for x in texts] == [told] * warned
    assert all(x.filename == __file__ for x in caught)


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
        every(2, Strategy(**fields))


def test_functions_that_tell_no_signature_are_taken():
    assert isinstance(every(2, Strategy(init=iter)), Strategy)


def test_strategy_over_another_axis_is_refused():
    with pytest.raises(ValueError, match=r"axis is syncalgos\.WORKERS"):
        make_trainer(syncalgos.bmuf(axis="batch")).init(make_params())


def test_reset_of_another_optimizer_is_refused():
    strategy = every(2, syncalgos.reset(optax.adam(0.1)))
    with pytest.raises(ValueError, match="very inner optimizer"):
        make_trainer(strategy).init(make_params())


def test_steps_that_would_wrap_are_refused():
    """In int32 they would go on from -2³¹, and `until` would begin anew."""
    trainer = make_trainer(syncalgos.bmuf(2))
    state = trainer.init(make_params())
    state = state._replace(step=jnp.int32(2**31 - 1 - len(X[ROWS])))
    state, _ = trainer.run(state, BATCHES)
    assert int(state.step) == 2**31 - 1
    held = trainer.to_host(state)
    for again in (state, trainer.from_host(held)):
        with pytest.raises(ValueError, match="not to 214748365"):
            trainer.run(again, BATCHES)
    with pytest.raises(ValueError, match="not to 2147483648"):
        trainer.from_host(held._replace(step=np.int64(2**31)))
