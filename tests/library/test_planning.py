"""The plan of communication: by hand, by search, and beside measured links."""

import json
from functools import partial
from inspect import signature
from statistics import median
from typing import NamedTuple

import jax
import numpy as np
import optax
import pytest
from support.tiers import tiers

import syncalgos as sa
from syncalgos import reducers
from syncalgos.network import Network

ENTRIES = 1000
MODEL = {"a": jax.ShapeDtypeStruct((ENTRIES - 8,), "float32"), "b": np.zeros(8, "f")}
LINK = Network("a link", bandwidth=1e4, latency=0.05)
plan = partial(sa.plan, replica=MODEL, workers=4, step_seconds=0.5, network=LINK)

MLP = [
    jax.ShapeDtypeStruct(shape, "float32")
    for shape in ((784, 640), (640,), (640, 10), (10,))
]
RECORDS = "docs/records/slow_link.jsonl"
MEASURED = {"sync_sgd": sa.sync_sgd(), "diloco": sa.diloco(4), "bmuf": sa.bmuf(4)}
# docs/measured.md: so far above or below the model where the link dominates.
RANGE = 0.14


def test_a_plan_is_that_of_the_formulas():
    rings = LINK._replace(rings_only=True)
    ring_plan = plan(sa.diloco(16), network=rings)
    ring = 2 * 3 / 4 * 4 * ENTRIES / 1e4 + 6 * 0.05  # bytes, and 2 (N - 1) hops
    assert (ring_plan.period, ring_plan.syncs, ring_plan.bytes, ring_plan.messages) == (
        16,
        8,
        6000,
        6,
    )
    assert ring_plan.seconds == pytest.approx(ring)
    assert ring_plan.share == pytest.approx(ring / (ring + 16 * 0.5))
    assert ring_plan.enough == int(np.ceil(19 * ring / 0.5))
    unfused_plan = plan(sa.diloco(16), network=rings, fused=False)
    assert unfused_plan.messages == 12 and unfused_plan.seconds == pytest.approx(
        ring + 0.3
    )
    # XLA joins the arrays of all-reduces alone.
    int8_messages = plan(sa.diloco(16, reduce="int8"), fused=False).messages
    assert plan(sa.diloco(16, reduce="int8")).messages == int8_messages


def test_messages_between_processes_on_cpus_are_those_that_gloo_gets():
    """As in two processes: 40 kB to a peer, and 8 MB in an all-reduce."""
    leaves = [jax.ShapeDtypeStruct((500_000,), "float32")] * 6  # of 2 MB

    def messages(strategy: sa.Strategy) -> float:
        by_gloo = Network("a link, gloo", 1e4, latency=0.1, rings_only=True)
        return plan(strategy, replica=leaves, network=by_gloo).messages

    assert messages(sa.gossip()) == 6 * 2_000_000 / 40_000
    assert messages(sa.sync_sgd()) == 2 * 2 * (4 - 1)  # 8 MB and 4 MB, in 6 hops


def test_a_plan_is_told_in_a_paragraph():
    settings = {"workers": 8, "step_seconds": 0.2, "network": "100Mbit/s, 20ms"}
    gpt2 = jax.ShapeDtypeStruct((124_000_000,), "float32")
    text = str(sa.plan(sa.diloco(64), gpt2, **settings))
    assert text.startswith(
        "A sync of 8 workers takes 69.7 s on 100 Mbit/s, 20 ms: each worker sends "
        "868 MB, in 14 messages one after the other (all-reduces by ring). With a "
        "period of 64 local steps of 200 ms, communication takes 84.5 % of the time (a "
        "step takes 1.29 s on average); it is at most 5 % with a period of "
        "6,624 or more. Each call of `step` or `run` also averages the metrics, in "
        "60 ms, so take many steps in a "
    )
    assert "beside 8 local steps of computation if these overlap" in str(
        plan(sa.co2(8))
    )
    assert "no period brings that to 5 %" in str(plan(sa.gossip_pga(8)))
    text = str(plan(sa.sync_sgd(), share=0.9))
    assert (
        "With 64 syncs in 64 local steps" in text and " if one step in 1 sent" in text
    )


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(partial(sa.diloco, reduce="int8"), marks=pytest.mark.slow),
        sa.co2,
        lambda period: sa.delayed(sa.model_averaging(period), 1),
        lambda period: sa.chain(sa.every(sa.average(), period)),
    ],
)
def test_the_smallest_period_is_found_by_trying_all(make):
    """Over many rounds: the first one waits for nothing, if messages are late."""
    limit = 0.2
    smallest_period = plan(make(4), share=limit).enough or 0
    shares = {
        h: plan(make(h), steps=60 * h).share
        for h in (smallest_period - 1, smallest_period)
    }
    assert shares[smallest_period] <= limit < shares[smallest_period - 1]


@pytest.mark.slow
def test_the_smallest_period_is_one_that_the_algorithm_takes():
    make = partial(sa.streaming_diloco, fragments=4)
    smallest_period = plan(make(8)).enough or 0
    assert (
        plan(make(smallest_period)).share
        <= 0.05
        < plan(make(smallest_period - 4)).share
    )


FIRST_STEPS = 240  # a first phase is over by then
LASTING_STEPS = 720 * 2  # whole rounds of all periods that are tried


def measure_lasting_share(strategy, *, step_seconds, **workload):
    """The share of the time that workers wait for messages after the first steps."""
    total_seconds = []
    for steps in (FIRST_STEPS, FIRST_STEPS + LASTING_STEPS):
        planned = plan(strategy, steps=steps, step_seconds=step_seconds, **workload)
        total_seconds.append(steps * step_seconds / (1 - planned.share))
    return 1 - LASTING_STEPS * step_seconds / (total_seconds[1] - total_seconds[0])


def find_smallest_period(make, *, share, longest, **workload):
    """The smallest period at which sends take at most a share of many local steps."""
    for period in range(1, longest):
        if measure_lasting_share(make(period), **workload) <= share:
            return period
    return None


class GroupedPlan(NamedTuple):
    """A plan of averages in groups, which follow a period of their own."""

    period: int
    inner_period: int
    bandwidth: float  # bytes/s
    latency: float  # s
    share: float


GROUPED_PLANS = {
    "the law ends below its period": GroupedPlan(16, 4, 1.25e8, 1e-3, 0.2),
    "on a slower link": GroupedPlan(16, 4, 3.75e7, 1e-3, 0.2),
    "its period is no multiple": GroupedPlan(6, 4, 1e7, 1e-3, 0.35),
    "its period is shorter": GroupedPlan(2, 4, 1e7, 0.0, 0.3),
    "the inner one is long": GroupedPlan(3, 5, 1.5e7, 1e-3, 0.2),
    "more than the inner one allows": GroupedPlan(16, 2, 3e6, 1e-3, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", GROUPED_PLANS)
def test_the_smallest_period_between_groups_is_that_of_a_search(name):
    case = GROUPED_PLANS[name]
    workload = {
        "replica": np.zeros(100_000, np.float32),
        "workers": 8,
        "step_seconds": 0.05,
        "network": Network("a link", bandwidth=case.bandwidth, latency=case.latency),
    }

    def make(period):
        return sa.hierarchical(period, inner_period=case.inner_period, groups=2)

    smallest = find_smallest_period(make, share=case.share, longest=17, **workload)
    planned = plan(make(case.period), share=case.share, **workload)
    assert planned.enough == smallest


PERIODIC = {
    "hierarchical": lambda period: sa.hierarchical(period, inner_period=3, groups=2),
    "des_loc": lambda period: sa.des_loc(period, first_period=4, second_period=6),
    "post_local_sgd": lambda period: sa.post_local_sgd(100, period),
    "gossip_pga": sa.gossip_pga,
    "delayed": lambda period: sa.delayed(sa.model_averaging(period), 1, arrival="add"),
    "diloco": sa.diloco,
    "every": lambda period: sa.every(sa.average(), period),
    "qsr": lambda period: sa.qsr(period, learning_rate=1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", PERIODIC)
def test_the_smallest_period_is_that_of_a_search_on_any_network(name, seed):
    draws = np.random.default_rng([seed, *name.encode()])
    own_period = int(draws.choice([2, 3, 4, 6, 8]))
    params = np.zeros(50_000, np.float32)
    workload = {
        "replica": sa.Replica(params, optax.adam(0.1).init(params)),
        "workers": 4,
        "step_seconds": 0.05,
        "network": Network(
            "a link",
            bandwidth=float(10 ** draws.uniform(6.3, 8)),
            latency=float(draws.choice([0, 1e-4, 2e-3])),
        ),
        "share": float(draws.uniform(0.1, 0.4)),
    }
    planned = plan(PERIODIC[name](own_period), **workload)
    longest = 13
    smallest = find_smallest_period(PERIODIC[name], longest=longest, **workload)
    if smallest is None:
        assert planned.enough is None or planned.enough >= longest
    else:
        assert planned.enough == smallest


def test_a_first_phase_does_not_count_in_long_periods():
    """A window of 16 periods of 1,024 steps is as long as all counted steps."""
    dense = plan(sa.post_local_sgd(dense_steps=100, period=1024))
    assert dense.enough == plan(sa.model_averaging(1024)).enough


def test_a_plan_of_next_to_nothing_takes_no_negative_time():
    planned = plan(sa.bmuf(4), step_seconds=1e9, network="1Gbit/s")
    assert planned.share >= 0
    assert "communication takes 0 % of the time" in str(planned)


def test_a_network_without_a_latency_is_said_to_have_none():
    assert " on 1 Gbit/s, without a latency: each" in str(
        plan(sa.bmuf(4), network="1Gbit/s")
    )
    assert "without a latency" not in str(plan(sa.bmuf(4), network="1Gbit/s, 1ms"))


def test_a_fixed_delay_does_not_grow_with_the_period():
    late_gossip = sa.gossip(topology="ring")
    late_plan = plan(late_gossip)
    assert (late_plan.late, late_plan.period) == (1, 1)
    assert late_plan.enough == plan(sa.every(late_gossip, 4)).enough
    assert plan(sa.every(late_gossip, late_plan.enough)).share <= late_plan.limit


@pytest.mark.slow
def test_syncs_that_follow_another_law_than_their_period_are_not_planned_by_it():
    rate = optax.cosine_decay_schedule(0.4, 200)
    growing_rounds = sa.qsr(4, learning_rate=rate)
    nested_periods = sa.every(sa.model_averaging(4), 6)
    for lawless_plan in (plan(growing_rounds, steps=200), plan(nested_periods)):
        assert (lawless_plan.period, lawless_plan.enough) == (None, None)
        assert "; no period is known" in str(lawless_plan)


@pytest.mark.slow
def test_the_smallest_period_of_workers_that_do_not_wait_is_found_without_a_law():
    async_plan = plan(sa.async_diloco(4), share=0.2)
    smallest_period = async_plan.enough or 0
    shares = [
        plan(sa.async_diloco(h), steps=4000).share
        for h in (smallest_period - 5, smallest_period)
    ]
    assert async_plan.period is None and shares[1] <= 0.2 < shares[0]


@pytest.mark.slow
def test_bytes_of_every_step_are_in_no_period():
    assert plan(sa.gossip_pga(8)).enough is None
    assert plan(sa.gossip_pga(8), step_seconds=60.0).enough is not None


@pytest.mark.slow
def test_bytes_that_no_period_reduces_count_at_each_step():
    """Costlier neighbors than the mean over all, sums in groups, or a first phase."""
    settings = {"step_seconds": 8.0, "share": 0.2}
    assert plan(sa.gossip_pga(8, topology="complete"), **settings).enough == 1
    averaging_period = plan(sa.model_averaging(8)).enough
    assert plan(sa.post_local_sgd(period=8)).enough == averaging_period

    def average_groups(period: int) -> sa.Strategy:
        return sa.hierarchical(period, inner_period=1, groups=2)

    smallest_period = plan(average_groups(8), step_seconds=3.0, share=0.2).enough or 0
    shares = [
        plan(average_groups(h), step_seconds=3.0).share
        for h in (smallest_period - 1, smallest_period)
    ]
    assert shares[1] <= 0.2 < shares[0]


@pytest.mark.slow
def test_a_first_sync_beyond_eight_periods_is_found():
    late_average = sa.after(sa.average(), 5000)
    assert plan(late_average).steps > 5000 and plan(late_average).period == 1
    assert plan(sa.ema(sa.diloco(100), decay=0.9)).period == 100


@pytest.mark.slow
def test_a_plan_of_any_algorithm_adds_up():
    """Strategies that decide by the data need decisions, as in the ledger."""
    rings = LINK._replace(rings_only=True)
    for name, make in sa.ALGORITHMS.items():
        takes_rate = "learning_rate" in signature(make).parameters
        strategy = make(**{"learning_rate": 0.1} if takes_rate else {})
        settings = {"steps": 64, "workers": 4}
        if name == "dynamic_averaging":
            settings["taken"] = np.ones((64, 1), bool)
        counts = sa.communication(strategy, MODEL, **settings)
        if counts.syncs:
            algorithm_plan = plan(strategy, network=rings, **settings)
            assert algorithm_plan.bytes * algorithm_plan.syncs == pytest.approx(
                counts.bytes_per_worker
            )
            assert 0 <= algorithm_plan.share < 1 and algorithm_plan.messages > 0


@pytest.mark.parametrize("name", tiers(MEASURED, ["sync_sgd"]))
def test_measured_links_take_as_long(name, request):
    """In the range that the page of the measurements states."""
    lines = (request.config.rootpath / RECORDS).read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["algorithm"] == name]
    compared_records = [r for r in records if r["latency"] == 20 or r["rate"] == 10]
    assert len(compared_records) == 4
    for record in compared_records:
        link = f"{record['rate']}Mbit/s, {record['latency']}ms, gloo"
        step_seconds = median(record["alone"]) / record["steps"]
        settings = {
            "workers": 2,
            "step_seconds": step_seconds,
            "steps": record["steps"],
        }
        link_plan = sa.plan(MEASURED[name], MLP, network=link, **settings)
        # A dispatch adds a send of its metrics: two hops of two latencies.
        modelled_seconds = (
            link_plan.seconds * link_plan.syncs + 2 * 2 * record["latency"] / 1000
        )
        sync_seconds = median(record["seconds"]) - median(record["alone"])
        assert sync_seconds == pytest.approx(modelled_seconds, rel=RANGE)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"workers": 1}, "workers must be a whole number of at least 2, got 1"),
        ({"step_seconds": 0}, "step_seconds must be .* above 0"),
        ({"share": 1}, "share must be .* below 1"),
        ({"strategy": sa.Strategy()}, "sends nothing in 32768 local steps"),
        ({"strategy": sa.bmuf(8), "steps": 4}, "sends nothing in 4 local steps"),
        ({"strategy": sa.bmuf(8), "steps": 0}, "steps must be .* at least 1, got 0"),
        ({"strategy": sa.dynamic_averaging()}, "pass a run's decisions"),
        ({"strategy": reducers.mean()}, "plan: expected a Strategy"),
    ],
)
def test_a_strategy_that_cannot_be_planned_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        plan(**{"strategy": sa.bmuf(8), **changed})
