"""Syncs that the workers' data decide on: together, noted, and counted afterwards."""

import itertools
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from support.problems.linear import BATCHES, make_params, make_trainer
from support.requirements import PERIOD
from support.resumed_runs import run, signal_before, untimed_lines

import syncalgos as sa

PARAMS = 4 * 7  # bytes of the linear model
STEPS = len(BATCHES["x"])


def far(replica, state, step):
    """A worker's vote: how far it is, which differs between workers and steps."""
    return jnp.sum(replica.params["w"] ** 2) > 1.7


def at(steps):
    """A vote at some steps, of worker 1 alone."""
    return lambda replica, state, step: (
        (jnp.isin(step, jnp.array(steps))) & (sa.collectives.index() == 1)
    )


def ring(size, workers=4):
    return 2 * (workers - 1) / workers * size


def trained(strategy, parts=(STEPS,), **options):
    """Returns the trainer, its last state, and what was decided at each step."""
    trainer = make_trainer(strategy, **options)
    state = trainer.init(make_params())
    first = 0
    told = []
    for steps in parts:
        batches = jax.tree.map(lambda x, a=first, b=steps: x[a : a + b], BATCHES)
        state, metrics = trainer.run(state, batches)
        told.append(np.asarray(metrics["decided"]))
        first += steps
    return trainer, state, np.concatenate(told)


def test_one_worker_that_asks_lets_all_sync_and_each_sync_is_counted():
    """And the center is that of the last sync."""
    trainer = make_trainer(sa.decided(sa.outer_step(optax.sgd(1.0)), at([2, 3, 7])))
    state = trainer.init(make_params())
    apart = []
    told = []
    centers = [trainer.center(state).params["w"]]
    for step in range(STEPS):
        batch = jax.tree.map(lambda x, a=step: x[a : a + 1], BATCHES)
        state, metrics = trainer.run(state, batch)
        apart.append(trainer.divergence(state) > 1e-6)
        told.append(metrics["decided"][0])
        centers.append(trainer.center(state).params["w"])
    asked = np.isin(np.arange(STEPS), [2, 3, 7])
    np.testing.assert_array_equal(np.array(told)[:, 0], asked)
    np.testing.assert_array_equal(apart, ~asked)
    moved = [(x != y).any() for x, y in itertools.pairwise(centers)]
    np.testing.assert_array_equal(moved, asked)
    sent = trainer.communication(state, STEPS, taken=np.array(told))
    moved = np.diff(sent.per_step, prepend=0)
    np.testing.assert_allclose(moved, np.where(asked, ring(4 + PARAMS), ring(4)))
    np.testing.assert_array_equal(sent.calls_per_step, np.cumsum(1 + 2 * asked))
    alone = trainer.communication(state, STEPS, workers=1, taken=np.array(told))
    assert alone.bytes_per_worker == 0


@pytest.mark.slow
def test_merged_lanes_report_what_is_decided():
    both = sa.sync_sgd()._replace(sync=sa.decided(sa.average(), far).sync)
    both = both._replace(init=lambda params: sa.decided(sa.average(), far).init(params))
    *_, vectorized = trained(both, lane_form="vectorized")
    *_, merged = trained(both, lane_form="merged")
    np.testing.assert_array_equal(merged, vectorized)
    assert 0 < merged.sum() < STEPS


def sums_outside_of_branches(jaxpr):
    """The sizes of what is all-reduced whatever is decided."""
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "psum":
            sizes += [v.aval.size for v in equation.invars]
        if equation.primitive.name != "cond":
            for inner in core.jaxprs_in_params(equation.params):
                sizes += sums_outside_of_branches(inner)
    return sizes


def test_a_sync_that_is_not_decided_on_stays_a_branch_in_lanes():
    """Under vmap a branch on what differs between lanes would compute both arms."""
    strategy = sa.decided(sa.average(), far)

    def sync(replica, state):
        return strategy.sync(replica, state, 0)

    lanes = jax.vmap(sync, axis_name="lanes", axis_size=3)
    of_three = jax.tree.map(
        lambda x: jnp.stack([x] * 3), (make_params(), strategy.init(make_params()))
    )
    jaxpr = jax.make_jaxpr(lanes, axis_env=[("devices", 2)])(
        sa.Replica(of_three[0]), of_three[1]
    )
    assert sums_outside_of_branches(jaxpr.jaxpr) == [3]  # the votes of the lanes


@pytest.mark.slow
def test_decisions_in_phases_chains_and_masks_are_counted():
    """At the first step of a phase too, which makes its state anew."""
    mask = {"w": True, "b": False}
    late = sa.after(sa.masked(sa.decided(sa.average(), at([4, 7])), mask), 4)
    strategy = sa.chain(
        sa.until(sa.sync_sgd(), 4),
        late,
        sa.every(sa.decided(sa.average("opt_state"), at([5])), 3),
    )
    trainer, state, told = trained(strategy)
    np.testing.assert_array_equal(np.flatnonzero(told[:, 0]), [4, 7])
    np.testing.assert_array_equal(np.flatnonzero(told[:, 1]), [5])
    moved = np.diff(trainer.communication(state, STEPS, taken=told).per_step, prepend=0)
    expected = np.repeat([PARAMS, 4.0], [4, STEPS - 4])
    expected[[4, 7]] += PARAMS - 4  # without the bias
    expected[[2, 5, 8, 11]] += 4
    expected[5] += PARAMS
    np.testing.assert_allclose(moved, ring(1) * expected)


def test_at_syncs_acts_where_it_is_decided_to_sync():
    optimizer = optax.sgd(0.05, momentum=0.9)
    trace = []
    sometimes = sa.every(sa.decided(sa.average(), at([3, 4, 9])), 2)
    strategy = sa.at_syncs(sometimes, sa.reset(optimizer))
    # What is behind it already stays there.
    trainer = make_trainer(sa.at_syncs(strategy, sa.average("buffers")))
    state = trainer.init(make_params())
    for step in range(STEPS):
        batch = jax.tree.map(lambda x, a=step: x[a : a + 1], BATCHES)
        state, _ = trainer.run(state, batch)
        trace.append(not any(map(np.any, jax.tree.leaves(state.replica.opt_state))))
    np.testing.assert_array_equal(np.flatnonzero(trace), [3, 9])


def test_what_is_decided_cannot_be_counted_without_the_decisions():
    strategy = sa.every(sa.decided(sa.average(), far), 2)
    with pytest.raises(ValueError, match=r"depends on more .* metrics\['decided'\]"):
        sa.communication(strategy, make_params(), workers=4, steps=STEPS)
    with pytest.raises(ValueError, match=r"\(12, 1\) booleans, got shape \(5, 1\)"):
        taken = np.zeros((5, 1), bool)
        sa.communication(strategy, make_params(), workers=4, steps=STEPS, taken=taken)


def test_a_model_that_is_not_finite_asks_for_an_average():
    strategy = sa.dynamic_averaging(1, bound=1e3, axis="workers")

    def sync(x):
        state = strategy.init({"w": jnp.zeros(2)})
        return strategy.sync(sa.Replica({"w": x}), state, jnp.int32(0))[0].params["w"]

    models = jnp.array([[np.nan, 0.0], [2.0, 4.0]])
    [first, second] = jax.vmap(sync, axis_name="workers")(models)
    np.testing.assert_array_equal(first, [np.nan, 2.0])
    np.testing.assert_array_equal(second, [np.nan, 2.0])


DYNAMIC = "--task support.tiny_tasks:drawing --workers 2 --steps 11 --eval-every 4"
DYNAMIC += f" --algo dynamic_averaging --period {PERIOD // 2} --bound 0.05"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(DYNAMIC, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_counts_its_bytes_as_it_is_decided(whole):
    s = whole.with_code(0).summary
    params = (s["bytes_per_worker"] - 5 * 4) / max(s["decided"], 1)
    assert 0 < s["decided"] < 5  # of the votes after steps 2, 4, …
    assert s["syncs"] == 5
    assert whole.lines[-1]["bytes_per_worker"] == s["bytes_per_worker"]
    for line, votes in zip(whole.lines, (2, 4, 5), strict=True):
        averages = (line["bytes_per_worker"] - 4 * votes) / params
        assert averages == int(averages) <= votes
    assert f"in 5 syncs, {s['decided']} of them triggered by the data" in whole.stdout
    assert "bytes are counted during the run" in whole.stderr


@pytest.mark.slow
def test_a_run_that_goes_on_counts_as_if_it_had_not_stopped(whole, tmp_path):
    command = f"{DYNAMIC} --dispatch-steps 1"
    run(command, tmp_path / "out", signal_before(8, signal.SIGTERM)).with_code(75)
    ended = run(f"{command} --resume", tmp_path / "out").with_code(0)
    for name in ("bytes_per_worker", "syncs", "decided"):
        assert ended.summary[name] == whole.summary[name]
    sent = [[x["bytes_per_worker"] for x in untimed_lines(r)] for r in (ended, whole)]
    assert sent[0][-2:] == sent[1][-2:]
