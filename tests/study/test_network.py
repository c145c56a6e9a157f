"""The network model, against formulas of the literature and a simulation by events."""

import json

import jax
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.problems.quadratics import NOISE, START, STEPS, train, unflatten
from support.requirements import make, owed
from support.tiers import tiers

import syncalgos
from benchmarks.network import published
from experiments.training.sends import from_json, to_json
from syncalgos import Strategy, chain, collectives, communication, delayed, every
from syncalgos import network as net
from syncalgos._ledger.traced import COLLECTIVES
from syncalgos.network import Network, Sends

PARAMS = {"w": np.zeros((4, 4), np.float32), "b": np.zeros(8, np.float32)}
BYTES = 4 * (16 + 8)
LINK = Network("a link", bandwidth=1000.0, latency=0.25)
UNIT = Network("a byte a second", bandwidth=1.0, latency=0.0)
SETTINGS = settings(max_examples=60, deadline=None)


def count_sends(strategy, workers=4, steps=6, params=PARAMS, decisions=None):
    return net.sends(
        communication(strategy, params, workers=workers, steps=steps, taken=decisions)
    )


def syncing(action):
    def sync(replica, state, step):
        return replica._replace(params=action(replica.params)), state

    return Strategy(sync=sync)


def messages(seconds):
    """Sends that take so long on UNIT at each step."""
    kinds = [{}, *({"permute": (float(s), 1)} for s in seconds)]
    return Sends(kinds, list(range(1, len(kinds))))


# What users say.


@pytest.mark.parametrize(
    ("text", "bandwidth", "latency"),
    [
        ("100Mbit/s, 20ms", 12.5e6, 0.02),
        ("20ms,100Mbit/s", 12.5e6, 0.02),
        (" 100 Mbit/s ,  20 ms ", 12.5e6, 0.02),
        ("1e2Mbit/s,.02s", 12.5e6, 0.02),
        ("10Gbit/s", 1.25e9, 0.0),
        ("8bit/s, 0s", 1.0, 0.0),
        ("16kbit/s, 5us", 2e3, 5e-6),
        ("2Tbit/s, 7ns", 2.5e11, 7e-9),
        ("3B/s, 1µs", 3.0, 1e-6),
        ("3kB/s, 1μs", 3e3, 1e-6),
        ("3MB/s", 3e6, 0.0),
        ("450GB/s, 3.4us", 4.5e11, 3.4e-6),
        ("1.5TB/s", 1.5e12, 0.0),
    ],
)
def test_bandwidth_and_latency_are_read_in_any_order_and_unit(text, bandwidth, latency):
    read = net.parse(text)
    assert read[1:3] == pytest.approx((bandwidth, latency), rel=1e-15)
    assert not read.rings_only
    assert net.parse(read.name) == read


def test_one_network_has_one_name_however_it_is_spelt():
    assert net.parse("100Mbit/s,20ms").name == "100 Mbit/s, 20 ms"
    assert net.parse(" 1e2 Mbit/s , 20.0ms").name == "100 Mbit/s, 20 ms"


def test_a_hop_by_gloo_takes_two_latencies_in_a_ring():
    read = net.parse("100Mbit/s, 20ms, gloo")
    assert read == ("100 Mbit/s, 20 ms, gloo", 12.5e6, 0.04, True)
    assert net.parse(read.name) == read
    assert net.parse("dsl, gloo") == ("dsl, gloo", 9.8e6 / 8, 2 * 0.049, True)
    # An all-reduce of two workers is two hops.
    assert net.cost({"all_reduce": (12.5e6, 1)}, read, 2) == pytest.approx(1.08)


def test_presets_have_names_in_any_case_and_go_from_the_fastest_to_the_slowest():
    assert list(net.PRESETS) == ["nvlink", "10gbe", "two-data-centres", "dsl"]
    for name, text in net.PRESETS.items():
        network = net.parse(name)
        assert network == (name, *net.parse(text)[1:])
        assert net.parse(name.upper().replace("-", " ")) == network
    bandwidths = [net.parse(name).bandwidth for name in net.PRESETS]
    assert bandwidths == sorted(bandwidths, reverse=True)


# What a run sends.


def test_sends_hold_each_kind_of_step_once():
    strategy = chain(
        every(syncalgos.average(), 2),
        every(syncing(lambda params: collectives.shift(params, 1)), 3),
    )
    ring = (1.5 * BYTES, 2)
    permute = (float(BYTES), 2)  # of 4 workers; two arrays
    kinds, steps = count_sends(strategy, workers=4, steps=6)
    assert kinds[0] == {}
    assert [kinds[i] for i in steps] == [
        {},
        {"all_reduce": ring},
        {"permute": permute},
        {"all_reduce": ring},
        {},
        {"all_reduce": ring, "permute": permute},
    ]
    assert len(kinds) == 4


def test_one_worker_sends_nothing_pays_nothing_and_only_computes():
    assert count_sends(syncalgos.sync_sgd(), workers=1, steps=3) == Sends(
        [{}], [0, 0, 0]
    )
    assert net.cost({"permute": (500.0, 2)}, LINK, 1) == 0
    seconds = net.modelled_seconds(messages([9, 9, 9]), UNIT, 1, 2.0, delay=1)
    np.testing.assert_array_equal(seconds, [2, 4, 6])


def test_steps_that_send_alike_are_one_kind_where_a_ring_cuts_unevenly():
    """Kind 0 sends nothing, even if all steps send."""
    kinds, steps = count_sends(syncalgos.sync_sgd(), workers=7, steps=1000)
    assert (kinds[0], len(kinds), {*steps}) == ({}, 2, {1})
    size, calls = kinds[1]["all_reduce"]
    assert size == pytest.approx(2 * 6 / 7 * BYTES, abs=1e-3)
    assert calls == 2


def test_the_json_of_long_runs_is_short():
    original = count_sends(every(syncalgos.average(), 16), workers=7, steps=10_000)
    assert len(json.dumps(to_json(original))) < 10_000


@SETTINGS
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["all_reduce", "permute", "all_gather"]),
            st.tuples(st.floats(0, 1e18), st.integers(0, 1000)),
        ),
        min_size=1,
        max_size=4,
    ),
    st.lists(st.integers(0, 3), max_size=30),
)
def test_any_sends_survive_json_exactly(kinds, steps):
    original = Sends(kinds, steps)
    assert from_json(json.loads(json.dumps(to_json(original)))) == original


# What it costs.


@pytest.mark.parametrize("p", [2, 3, 8])
def test_collectives_cost_what_the_literature_says(p):
    """Thakur, Rabenseifner and Gropp 2005, 4.1 and 4.5: n bytes, p workers, α and β."""
    n = 8400.0
    alpha = LINK.latency
    beta = 1 / LINK.bandwidth
    part = (p - 1) / p * n  # that a worker sends
    doublings = {2: 1, 3: 3, 8: 3}[p]
    around = (p - 1) * alpha + part * beta
    costs = {
        "all_gather": (part, around),
        "reduce_scatter": (part, around),
        "all_reduce": (2 * part, min(2 * around, doublings * (alpha + n * beta))),
        # Each of p parts goes straight to its worker, one after the other.
        "all_to_all": (part, (p - 1) * (alpha + n / p * beta)),
        "permute": (n, alpha + n * beta),
    }
    # What the ledger may count.
    assert costs.keys() == {kind for kind, _ in COLLECTIVES.values()}
    for kind, (sent_bytes, seconds) in costs.items():
        assert net.cost({kind: (sent_bytes, 1)}, LINK, p) == pytest.approx(seconds)


def test_fused_calls_of_a_collective_wait_for_its_hops_once():
    kind = {"all_reduce": (3000.0, 5), "permute": (500.0, 2), "all_gather": (0.0, 0)}
    # 2 (4-1) hops of each all-reduce, one of each permutation, at 0.25 s a hop.
    rings = LINK._replace(rings_only=True)
    assert net.cost(kind, rings, 4) == 3.5 + 0.25 * (6 * 5 + 1 * 2)
    assert net.cost(kind, rings, 4, fused=True) == 3.5 + 0.25 * (6 + 1)


# What the clock shows.


def test_without_delay_computation_and_communication_add_up():
    sends = count_sends(every(syncalgos.average(), 2), workers=2, steps=4)
    exchange = BYTES / 1000 + 2 * 0.25  # a message of each of two arrays
    seconds = net.modelled_seconds(sends, LINK, 2, step_seconds=3.0)
    expected = [3, 6 + exchange, 9 + exchange, 12 + 2 * exchange]
    np.testing.assert_allclose(seconds, expected, rtol=1e-12)


def test_steps_before_the_delay_applies_wait_at_once():
    sends = messages([3] * 6)
    seconds = net.modelled_seconds(sends, UNIT, 2, 1.0, delay=2, since=2)
    # Two steps of 1 + 3 s; then messages from 9 to 12, 12 to 15 and 15 to 18.
    np.testing.assert_array_equal(seconds, [4, 8, 9, 10, 12, 15])
    always = net.modelled_seconds(sends, UNIT, 2, 1.0, delay=2, since=6)
    np.testing.assert_array_equal(always, net.modelled_seconds(sends, UNIT, 2, 1.0))


def simulated(durations, step_seconds, delay):
    """The same by events in order of time: a worker and a link, each with its queue."""
    ended = {}
    arrived = set()
    queue = []
    on_link = None  # of steps; (when it arrives, its step)
    clock = 0.0
    step = 0
    computing = step_seconds  # `computing` ends then, if not None
    while len(ended) < len(durations):
        moved = True
        while moved:  # everything that happens at this time
            moved = False
            if on_link and on_link[0] <= clock:
                arrived.add(on_link[1])
                on_link = None
                moved = True
            if on_link is None and queue:
                next_step = queue.pop(0)
                on_link = (clock + durations[next_step], next_step)
                moved = True
            if computing is not None and computing <= clock:
                computing = None
                moved = True
                if not delay:
                    queue.append(step)
            awaited = step - delay
            is_there = awaited < 0 or awaited in arrived
            if computing is None and is_there and step < len(durations):
                ended[step] = clock
                if delay:
                    queue.append(step)
                step = step + 1
                computing = clock + step_seconds
                moved = True
        clock = min(t for t in (computing, on_link and on_link[0]) if t is not None)
    return [ended[i] for i in range(len(durations))]


def draw_seconds(max_quarters):  # quarters of seconds: sums of them are exact
    return st.integers(1, max_quarters).map(lambda x: x / 4)


@SETTINGS
@given(
    st.lists(draw_seconds(30), min_size=1, max_size=25),
    draw_seconds(12),
    st.integers(0, 7),
)
def test_delays_agree_with_a_simulation_by_events(durations, step_seconds, delay):
    seconds = net.modelled_seconds(messages(durations), UNIT, 2, step_seconds, delay)
    assert seconds.tolist() == simulated(durations, step_seconds, delay)


# Which algorithms let their sends take a while: what the others did first shows in a
# worker's params so many steps after the first sync. Noise on one worker tells.

LATE = {
    "streaming": ("streaming_diloco", {"fragments": 2}),
    "streaming, 3 steps": ("streaming_diloco", {"fragments": 1, "delay": 3}),
    "eager": ("eager_diloco", {"period": 3}),
    "overlap": ("overlap_local_sgd", {"period": 3}),
    "co2": ("co2", {"period": 3}),
    "low rank": ("diloco_x", {"period": 3}),
    "exponential graph": ("gossip", {}),
    "ring": ("gossip", {"topology": "ring"}),
    "gradient tracking": ("gradient_tracking", {}),
}
# A worker that others wait for, and that waits. Of asynchronous workers that arrive
# together a later one starts from what the others did.
WAITING = {"diloco": 0, "decoupled_diloco": 0, "async_diloco": 1, "halos": 1}
CASES = {key: (*case, 0) for key, case in LATE.items()}
CASES |= {name: (name, {}, watched) for name, watched in WAITING.items()}
AT_ONCE = "streaming, 3 steps", "exponential graph"
SLOW = "eager", "low rank", "gradient tracking", "async_diloco"


@pytest.mark.parametrize("case", tiers(CASES, AT_ONCE, SLOW))
def test_delay_is_the_one_with_which_sends_take_effect(case):
    name, changes, watched = CASES[case]
    strategy = make(name, **changes)
    noise = NOISE.copy()
    noise[:, 1 - watched] *= -7
    with jax.enable_x64(True):
        usual, other = (train(strategy, workers=2, noise=n) for n in (NOISE, noise))
        decisions = owed(name).decisions(STEPS)
        params = unflatten(START)
        sends = communication(strategy, params, workers=2, steps=STEPS, taken=decisions)
    changed = (usual.replicas[:, watched] != other.replicas[:, watched]).any(1)
    assert changed.any()
    assert strategy.late == np.argmax(changed) - np.argmax(sends.per_step > 0)


def test_no_other_algorithm_declares_a_delay():
    undelayed_names = {*syncalgos.ALGORITHMS} - {name for name, _ in LATE.values()}
    assert [name for name in undelayed_names if make(name).late] == []


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        (delayed(every(syncalgos.average(), 8), 5), 5),
        (every(syncalgos.average(), 8), 0),
        (chain(delayed(every(syncalgos.average(), 8), 5), syncalgos.sync_sgd()), 0),
        (syncalgos.streaming_diloco(8, fragments=2, delay=3), 3),
        (syncalgos.masked(Strategy(late=6), True), 6),
        # What sends nothing waits for nothing.
        (syncalgos.at_syncs(syncalgos.co2(8), syncalgos.reset(optax.sgd(1.0))), 8),
    ],
)
def test_a_strategy_declares_when_its_messages_are_used(strategy, late):
    assert strategy.late == late


# What others have published.


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["DiLoCo", pytest.param("streaming, a step late, 4 bits", marks=pytest.mark.long)],
)
def test_bandwidths_are_those_of_the_streaming_diloco_paper(method):
    """Table 4, on a grid of bandwidths a fifth apart."""
    method_settings = published.MODELS["10B"], published.METHODS[method]
    modelled = published.bandwidths(*method_settings, hidden=published.BACKWARD)
    published_bandwidths = dict(
        zip(published.METHODS, published.PUBLISHED["10B"], strict=True)
    )[method]
    np.testing.assert_allclose(modelled[:4], published_bandwidths[:4], rtol=0.2)
