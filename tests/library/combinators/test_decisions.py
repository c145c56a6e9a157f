"""Syncs that the workers' data decide on: together, noted, and counted afterwards."""

import itertools
import signal
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core
from support.commands import EndedRun
from support.problems.linear import BATCHES, make_params, make_trainer
from support.requirements import PERIOD
from support.resumed_runs import run, signal_before, untimed_lines

import syncalgos as sa

PARAMS = 4 * 7  # bytes of the linear model
STEPS = len(BATCHES["x"])


def is_far(replica: sa.Replica, state: Any, step: jax.Array) -> jax.Array:
    """A worker's vote: how far it is, which differs between workers and steps."""
    return jnp.sum(replica.params["w"] ** 2) > 1.7


def vote_at_steps(steps: Sequence[int]) -> Callable:
    """A vote at some steps, of worker 1 alone."""
    return lambda replica, state, step: (
        (jnp.isin(step, jnp.array(steps))) & (sa.collectives.index() == 1)
    )


def ring_bytes(size: float, workers: int = 4) -> float:
    return 2 * (workers - 1) / workers * size


def train(
    strategy: sa.Strategy, parts: Sequence[int] = (STEPS,), **options: Any
) -> tuple[sa.DataParallel, Any, np.ndarray]:
    """Returns the trainer, its last state, and what was decided at each step."""
    trainer = make_trainer(strategy, **options)
    state = trainer.init(make_params())
    first_step = 0
    decisions = []
    for steps in parts:
        batches = jax.tree.map(lambda x, a=first_step, b=steps: x[a : a + b], BATCHES)
        state, metrics = trainer.run(state, batches)
        decisions.append(np.asarray(metrics["decided"]))
        first_step += steps
    return trainer, state, np.concatenate(decisions)


def test_one_worker_that_asks_lets_all_sync_and_each_sync_is_counted():
    """And the center is that of the last sync."""
    trainer = make_trainer(
        sa.decided(sa.outer_step(optax.sgd(1.0)), vote_at_steps([2, 3, 7]))
    )
    state = trainer.init(make_params())
    diverges = []
    decisions = []
    centers = [trainer.center(state).params["w"]]
    for step in range(STEPS):
        batch = jax.tree.map(lambda x, a=step: x[a : a + 1], BATCHES)
        state, metrics = trainer.run(state, batch)
        diverges.append(trainer.divergence(state) > 1e-6)
        decisions.append(metrics["decided"][0])
        centers.append(trainer.center(state).params["w"])
    expected = np.isin(np.arange(STEPS), [2, 3, 7])
    np.testing.assert_array_equal(np.array(decisions)[:, 0], expected)
    np.testing.assert_array_equal(diverges, ~expected)
    moved = [(x != y).any() for x, y in itertools.pairwise(centers)]
    np.testing.assert_array_equal(moved, expected)
    counts = trainer.communication(state, STEPS, taken=np.array(decisions))
    moved = np.diff(counts.per_step, prepend=0)
    np.testing.assert_allclose(
        moved, np.where(expected, ring_bytes(4 + PARAMS), ring_bytes(4))
    )
    np.testing.assert_array_equal(counts.calls_per_step, np.cumsum(1 + 2 * expected))
    single_counts = trainer.communication(
        state, STEPS, workers=1, taken=np.array(decisions)
    )
    assert single_counts.bytes_per_worker == 0


@pytest.mark.slow
def test_merged_lanes_report_what_is_decided():
    strategy = sa.sync_sgd()._replace(sync=sa.decided(sa.average(), is_far).sync)
    strategy = strategy._replace(
        init=lambda params: sa.decided(sa.average(), is_far).init(params)
    )
    *_, vectorized = train(strategy, lane_form="vectorized")
    *_, merged = train(strategy, lane_form="merged")
    np.testing.assert_array_equal(merged, vectorized)
    assert 0 < merged.sum() < STEPS


def list_sums_outside_branches(jaxpr: Any) -> list[int]:
    """The sizes of what is all-reduced whatever is decided."""
    sizes = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "psum":
            sizes += [v.aval.size for v in equation.invars]
        if equation.primitive.name != "cond":
            for inner_jaxpr in core.jaxprs_in_params(equation.params):
                sizes += list_sums_outside_branches(inner_jaxpr)
    return sizes


def test_a_sync_that_is_not_decided_on_stays_a_branch_in_lanes():
    """Under vmap a branch on what differs between lanes would compute both arms."""
    strategy = sa.decided(sa.average(), is_far)

    def sync(replica: sa.Replica, state: Any) -> Any:
        return strategy.sync(replica, state, 0)

    lanes = jax.vmap(sync, axis_name="lanes", axis_size=3)
    of_three = jax.tree.map(
        lambda x: jnp.stack([x] * 3), (make_params(), strategy.init(make_params()))
    )
    jaxpr = jax.make_jaxpr(lanes, axis_env=[("devices", 2)])(
        sa.Replica(of_three[0]), of_three[1]
    )
    assert list_sums_outside_branches(jaxpr.jaxpr) == [3]  # the votes of the lanes


@pytest.mark.slow
def test_decisions_in_phases_chains_and_masks_are_counted():
    """At the first step of a phase too, which makes its state anew."""
    mask = {"w": True, "b": False}
    late_average = sa.after(
        sa.masked(sa.decided(sa.average(), vote_at_steps([4, 7])), mask), 4
    )
    strategy = sa.chain(
        sa.until(sa.sync_sgd(), 4),
        late_average,
        sa.every(sa.decided(sa.average("opt_state"), vote_at_steps([5])), 3),
    )
    trainer, state, decisions = train(strategy)
    np.testing.assert_array_equal(np.flatnonzero(decisions[:, 0]), [4, 7])
    np.testing.assert_array_equal(np.flatnonzero(decisions[:, 1]), [5])
    step_bytes = np.diff(
        trainer.communication(state, STEPS, taken=decisions).per_step, prepend=0
    )
    expected = np.repeat([PARAMS, 4.0], [4, STEPS - 4])
    expected[[4, 7]] += PARAMS - 4  # without the bias
    expected[[2, 5, 8, 11]] += 4
    expected[5] += PARAMS
    np.testing.assert_allclose(step_bytes, ring_bytes(1) * expected)


def test_at_syncs_acts_where_it_is_decided_to_sync():
    optimizer = optax.sgd(0.05, momentum=0.9)
    is_reset = []
    decided_average = sa.every(sa.decided(sa.average(), vote_at_steps([3, 4, 9])), 2)
    strategy = sa.at_syncs(decided_average, sa.reset(optimizer))
    # What is behind it already stays there.
    trainer = make_trainer(sa.at_syncs(strategy, sa.average("buffers")))
    state = trainer.init(make_params())
    for step in range(STEPS):
        batch = jax.tree.map(lambda x, a=step: x[a : a + 1], BATCHES)
        state, _ = trainer.run(state, batch)
        is_reset.append(not any(map(np.any, jax.tree.leaves(state.replica.opt_state))))
    np.testing.assert_array_equal(np.flatnonzero(is_reset), [3, 9])


def test_syncs_that_are_decided_on_cannot_be_counted_without_the_decisions():
    strategy = sa.every(sa.decided(sa.average(), is_far), 2)
    with pytest.raises(ValueError, match=r"depends on more .* metrics\['decided'\]"):
        sa.communication(strategy, make_params(), workers=4, steps=STEPS)
    with pytest.raises(ValueError, match=r"\(12, 1\) booleans, got shape \(5, 1\)"):
        decisions = np.zeros((5, 1), bool)
        sa.communication(
            strategy, make_params(), workers=4, steps=STEPS, taken=decisions
        )


def test_a_model_that_is_not_finite_asks_for_an_average():
    strategy = sa.dynamic_averaging(1, bound=1e3, axis="workers")

    def sync(x: jax.Array) -> Any:
        state = strategy.init({"w": jnp.zeros(2)})
        return strategy.sync(sa.Replica({"w": x}), state, jnp.int32(0))[0].params["w"]

    models = jnp.array([[np.nan, 0.0], [2.0, 4.0]])
    [first_model, second_model] = jax.vmap(sync, axis_name="workers")(models)
    np.testing.assert_array_equal(first_model, [np.nan, 2.0])
    np.testing.assert_array_equal(second_model, [np.nan, 2.0])


DYNAMIC = "--task support.tiny_tasks:drawing --workers 2 --steps 11 --eval-every 4"
DYNAMIC += f" --algo dynamic_averaging --period {PERIOD // 2} --bound 0.05"


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(DYNAMIC, tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
def test_a_run_counts_its_bytes_as_it_is_decided(uninterrupted):
    summary = uninterrupted.with_code(0).summary
    params = (summary["bytes_per_worker"] - 5 * 4) / max(summary["decided"], 1)
    assert 0 < summary["decided"] < 5  # of the votes after steps 2, 4, …
    assert summary["syncs"] == 5
    assert uninterrupted.lines[-1]["bytes_per_worker"] == summary["bytes_per_worker"]
    for line, votes in zip(uninterrupted.lines, (2, 4, 5), strict=True):
        averages = (line["bytes_per_worker"] - 4 * votes) / params
        assert averages == int(averages) <= votes
    assert (
        f"in 5 syncs, {summary['decided']} of them triggered by the data"
        in uninterrupted.stdout
    )
    assert "bytes are counted during the run" in uninterrupted.stderr


def list_sent_bytes(finished_run: EndedRun) -> list[float]:
    """The bytes at each line of a run's metrics."""
    return [line["bytes_per_worker"] for line in untimed_lines(finished_run)]


@pytest.mark.slow
def test_a_run_that_goes_on_counts_as_if_it_had_not_stopped(uninterrupted, tmp_path):
    command = f"{DYNAMIC} --dispatch-steps 1"
    run(command, tmp_path / "out", signal_before(8, signal.SIGTERM)).with_code(75)
    ended = run(f"{command} --resume", tmp_path / "out").with_code(0)
    for name in ("bytes_per_worker", "syncs", "decided"):
        assert ended.summary[name] == uninterrupted.summary[name]
    assert list_sent_bytes(ended)[-2:] == list_sent_bytes(uninterrupted)[-2:]
