"""The network model, against formulas of the literature and a simulation by events."""

import json
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from owed import make, owed, parameters
from problems.quadratics import NOISE, START, train, unflatten

import syncalgos
from benchmarks.network import published
from experiments.study import network as net
from experiments.study.network import Network
from experiments.training.measurements import sends as sending
from experiments.training.measurements.sends import Sends
from syncalgos import Strategy, chain, collectives, communication, delayed, every

PARAMS = {"w": np.zeros((4, 4), np.float32), "b": np.zeros(8, np.float32)}
BYTES = 4 * (16 + 8)
LINK = Network("a link", bandwidth=1000.0, latency=0.25)
UNIT = Network("a byte a second", bandwidth=1.0, latency=0.0)
SETTINGS = settings(max_examples=60, deadline=None)


def sent(strategy, workers=4, steps=6, params=PARAMS, taken=None):
    return sending.sends(
        communication(strategy, params, workers=workers, steps=steps, taken=taken)
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
    assert read[1:] == pytest.approx((bandwidth, latency), rel=1e-15)
    assert net.parse(read.name) == read


def test_one_network_has_one_name_however_it_is_spelt():
    assert net.parse("100Mbit/s,20ms").name == "100 Mbit/s, 20 ms"
    assert net.parse(" 1e2 Mbit/s , 20.0ms").name == "100 Mbit/s, 20 ms"


def test_a_hop_by_gloo_takes_two_latencies():
    read = net.parse("100Mbit/s, 20ms, gloo")
    assert read == ("100 Mbit/s, 20 ms, gloo", 12.5e6, 0.04)
    assert net.parse(read.name) == read
    assert net.parse("dsl, gloo") == ("dsl, gloo", 9.8e6 / 8, 2 * 0.049)
    # An all-reduce of two workers is two hops.
    assert net.cost({"all_reduce": (12.5e6, 1)}, read, 2) == pytest.approx(1.08)


@pytest.mark.parametrize("name", net.PRESETS)
def test_preset_is_found_by_its_name_in_any_case(name):
    network = net.parse(name)
    assert network.name == name
    assert net.parse(name.upper().replace("-", " ")) == network
    assert network[1:] == net.parse(net.PRESETS[name])[1:]


def test_presets_go_from_the_fastest_to_the_slowest():
    bandwidths = [net.parse(name).bandwidth for name in net.PRESETS]
    assert list(net.PRESETS) == ["nvlink", "10gbe", "two-data-centres", "dsl"]
    assert bandwidths == sorted(bandwidths, reverse=True)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "'' is neither a preset nor a number"),
        ("100", "100 has no unit"),
        ("100, 20", "100 has no unit"),
        ("1,5Mbit/s", "1 has no unit"),
        ("100Mbit/s, 20", "20 has no unit"),
        ("100Mbit/s,", "'' is neither a preset nor a number"),
        ("100Mbps", r"unknown unit 'Mbps'.*did you mean 'Mbit/s'\?"),
        ("100Mbit/s, 20msec", r"unknown unit 'msec'"),
        ("-1Mbit/s", "-1Mbit/s must be at least 0"),
        ("1Mbit/s, -2ms", "-2ms must be at least 0"),
        ("1e999Mbit/s", "must be at least 0 and finite"),
        ("1e300Tbit/s", "the bandwidth must be above 0 and finite"),
        ("0Mbit/s, 1ms", "the bandwidth must be above 0"),
        ("20ms", "no bandwidth"),
        ("gloo", "'gloo' is neither a preset nor a number"),
        ("1Mbit/s, 2Mbit/s", "two bandwidths"),
        ("1Mbit/s, 0s, 2ms", "two latencies"),
        ("nan", "'nan' is neither a preset"),
        ("infMbit/s", "'infMbit/s' is neither a preset"),
        ("dls", r"'dls' is neither a preset.*did you mean 'dsl'\?"),
        ("10gb", r"unknown unit 'gb'.*did you mean '10gbe'\?"),
        ("two-data-centers", r"did you mean 'two-data-centres'\?"),
    ],
)
def test_what_is_no_network_is_refused_in_one_line_that_says_what_is(text, why):
    with pytest.raises(ValueError, match=why) as refused:
        net.parse(text)
    message = str(refused.value)
    assert message.startswith(f"network {text!r}: ")
    assert "\n" not in message
    assert "Mbit/s, 20ms" in message
    assert all(name in message for name in net.PRESETS)


# What a run sends.


def test_sends_hold_each_kind_of_step_once():
    strategy = chain(
        every(syncalgos.average(), 2),
        every(syncing(lambda params: collectives.shift(params, 1)), 3),
    )
    ring, permute = (1.5 * BYTES, 2), (float(BYTES), 2)  # of 4 workers; two arrays
    kinds, steps = sent(strategy, workers=4, steps=6)
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


def test_kind_0_sends_nothing_even_if_all_steps_send():
    kinds, steps = sent(syncalgos.sync_sgd(), workers=4, steps=3)
    assert kinds == [{}, {"all_reduce": (1.5 * BYTES, 2)}]
    assert steps == [1, 1, 1]


def test_one_worker_sends_nothing():
    assert sent(syncalgos.sync_sgd(), workers=1, steps=3) == Sends([{}], [0, 0, 0])


@pytest.mark.parametrize("workers", [3, 7])
def test_steps_that_send_alike_are_one_kind_where_a_ring_cuts_unevenly(workers):
    kinds, steps = sent(syncalgos.sync_sgd(), workers, steps=1000)
    assert len(kinds) == 2
    assert set(steps) == {1}
    size, calls = kinds[1]["all_reduce"]
    assert size == pytest.approx(2 * (workers - 1) / workers * BYTES, abs=1e-3)
    assert calls == 2


def test_sends_survive_json_exactly_and_compactly():
    strategy = every(syncalgos.average(), 16)
    original = sent(strategy, workers=7, steps=10_000)
    text = json.dumps(sending.to_json(original))
    assert sending.from_json(json.loads(text)) == original
    assert len(text) < 10_000


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
    assert (
        sending.from_json(json.loads(json.dumps(sending.to_json(original)))) == original
    )


# What it costs. Thakur, Rabenseifner and Gropp 2005, sections 4.1 and 4.5, of p workers
# and n bytes in the result, α the latency and β the seconds per byte.


def all_gather(p, n, alpha, beta):
    return (p - 1) * alpha + (p - 1) / p * n * beta


def reduce_scatter(p, n, alpha, beta):
    return (p - 1) * alpha + (p - 1) / p * n * beta


def reduced_everywhere(p, n, alpha, beta):
    return reduce_scatter(p, n, alpha, beta) + all_gather(p, n, alpha, beta)


ALPHA, BETA = LINK.latency, 1 / LINK.bandwidth
VECTOR = {"x": np.zeros(840, np.float32)}  # divides over all numbers of workers here
SIZE = 4 * 840


@pytest.mark.parametrize("p", [2, 3, 4, 8])
@pytest.mark.parametrize(
    ("action", "expected"),
    [
        (collectives.mean, lambda p: reduced_everywhere(p, SIZE, ALPHA, BETA)),
        (
            lambda tree: jax.tree.map(lambda x: x[0], collectives.gather(tree)),
            lambda p: all_gather(p, p * SIZE, ALPHA, BETA),
        ),
        (
            lambda tree: jax.tree.map(
                lambda x: jax.lax.psum_scatter(x, "workers", tiled=True), tree
            ),
            lambda p: reduce_scatter(p, SIZE, ALPHA, BETA),
        ),
        # Each of p parts goes straight to its worker, one after the other.
        (
            lambda tree: collectives.all_to_all(tree, "workers"),
            lambda p: (p - 1) * (ALPHA + SIZE / p * BETA),
        ),
        (lambda tree: collectives.shift(tree, 1), lambda p: ALPHA + SIZE * BETA),
    ],
    ids=["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"],
)
def test_collective_costs_what_the_literature_says(p, action, expected, request):
    name = request.node.callspec.id
    own_axis = "reduce-scatter" in name or "all-to-all" in name
    params = VECTOR
    if "all-to-all" in name:
        params = {"x": np.zeros((p, 840 // p), np.float32)}

    def sync(replica, state, step):
        made = jax.tree.map(lambda x: 0 * x.sum(), action(replica.params))
        params = jax.tree.map(lambda x, y: x + y, replica.params, made)
        return replica._replace(params=params), state

    axis = "workers" if own_axis else syncalgos.WORKERS
    counted = communication(Strategy(sync=sync, axis=axis), params, workers=p, steps=1)
    kinds, (kind,) = sending.sends(counted)
    assert net.cost(kinds[kind], LINK, p) == pytest.approx(expected(p), rel=1e-6)


def test_fused_calls_of_a_collective_wait_for_its_hops_once():
    kind = {"all_reduce": (3000.0, 5), "permute": (500.0, 2), "all_gather": (0.0, 0)}
    # 2 (4-1) hops of each all-reduce, one of each permutation, at 0.25 s a hop.
    assert net.cost(kind, LINK, 4) == 3.5 + 0.25 * (6 * 5 + 1 * 2)
    assert net.cost(kind, LINK, 4, fused=True) == 3.5 + 0.25 * (6 + 1)


def test_one_worker_pays_nothing():
    assert net.cost({"permute": (500.0, 2)}, LINK, 1) == 0


@pytest.mark.slow
def test_every_algorithms_collectives_have_a_cost():
    for name in syncalgos.ALGORITHMS:
        for kind in sent(make(name), 4, 8, taken=owed(name).taken(8)).kinds:
            assert (net.cost(kind, LINK, 4) > 0) == bool(kind)


# What the clock shows.


def test_without_delay_computation_and_communication_add_up():
    sends = sent(every(syncalgos.average(), 2), workers=2, steps=4)
    exchange = BYTES / 1000 + 2 * 0.25 * 2  # two hops of each of two arrays
    seconds = net.modelled_seconds(sends, LINK, 2, step_seconds=3.0)
    expected = [3, 6 + exchange, 9 + exchange, 12 + 2 * exchange]
    np.testing.assert_allclose(seconds, expected, rtol=1e-12)


def test_one_worker_only_computes():
    seconds = net.modelled_seconds(messages([9, 9, 9]), UNIT, 1, 2.0, delay=1)
    np.testing.assert_array_equal(seconds, [2, 4, 6])


def test_measured_link_is_no_faster_than_the_model():
    """Over a link shaped to 100 Mbit/s: 2.4 steps/s, and 34 with averages every 16."""
    network = net.parse("100Mbit/s")
    params = {"x": np.zeros(1_125_000, np.float32)}  # 4.5 MB

    def steps_per_second(strategy):
        sends = sent(strategy, workers=2, steps=160, params=params)
        return 160 / net.modelled_seconds(sends, network, 2, step_seconds=0.0)[-1]

    wire = steps_per_second(syncalgos.sync_sgd())
    assert 2.4 <= wire <= 2.8
    averaged = steps_per_second(syncalgos.model_averaging(16))
    assert averaged == pytest.approx(16 * wire)
    assert averaged >= 34


def test_hand_worked_delay_hides_what_the_link_can_carry_meanwhile():
    # One second a step, three a message, two steps on the way: messages are sent from
    # 1 to 4, 4 to 7, 7 to 10; steps 2, 3, 4 wait for them.
    seconds = net.modelled_seconds(messages([3] * 5), UNIT, 2, 1.0, delay=2)
    np.testing.assert_array_equal(seconds, [1, 2, 4, 7, 10])


def test_delay_that_is_long_enough_hides_a_sync_and_the_run_ends_without_it():
    seconds = net.modelled_seconds(messages([0, 2, 0, 0, 0, 5]), UNIT, 2, 1.0, 2)
    np.testing.assert_array_equal(seconds, [1, 2, 3, 4, 5, 6])
    late = net.modelled_seconds(messages([0, 2.5, 0, 0, 0, 5]), UNIT, 2, 1.0, 2)
    np.testing.assert_array_equal(late, [1, 2, 3, 4.5, 5.5, 6.5])


def test_steps_before_the_delay_applies_wait_at_once():
    sends = messages([3] * 6)
    seconds = net.modelled_seconds(sends, UNIT, 2, 1.0, delay=2, since=2)
    # Two steps of 1 + 3 s; then messages from 9 to 12, 12 to 15 and 15 to 18.
    np.testing.assert_array_equal(seconds, [4, 8, 9, 10, 12, 15])
    always = net.modelled_seconds(sends, UNIT, 2, 1.0, delay=2, since=6)
    np.testing.assert_array_equal(always, net.modelled_seconds(sends, UNIT, 2, 1.0))


def simulated(durations, step_seconds, delay):
    """The same by events in order of time: a worker and a link, each with its queue."""
    ended, arrived = {}, set()
    queue, on_link = [], None  # of steps; (when it arrives, its step)
    now, step, computing = 0.0, 0, step_seconds  # `computing` ends then, if not None
    while len(ended) < len(durations):
        moved = True
        while moved:  # everything that happens at this time
            moved = False
            if on_link and on_link[0] <= now:
                arrived.add(on_link[1])
                on_link, moved = None, True
            if on_link is None and queue:
                first = queue.pop(0)
                on_link, moved = (now + durations[first], first), True
            if computing is not None and computing <= now:
                computing, moved = None, True
                if not delay:
                    queue.append(step)
            awaited = step - delay
            is_there = awaited < 0 or awaited in arrived
            if computing is None and is_there and step < len(durations):
                ended[step] = now
                if delay:
                    queue.append(step)
                step, computing, moved = step + 1, now + step_seconds, True
        now = min(t for t in (computing, on_link and on_link[0]) if t is not None)
    return [ended[i] for i in range(len(durations))]


def times(most):  # quarters of seconds: sums of them are exact
    return st.integers(1, most).map(lambda x: x / 4)


@SETTINGS
@given(st.lists(times(30), min_size=1, max_size=25), times(12), st.integers(0, 7))
def test_delays_agree_with_a_simulation_by_events(durations, step_seconds, delay):
    seconds = net.modelled_seconds(messages(durations), UNIT, 2, step_seconds, delay)
    assert seconds.tolist() == simulated(durations, step_seconds, delay)


@SETTINGS
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=25),
    st.integers(2, 8),
    times(12),
    st.integers(0, 6),
    st.booleans(),
)
def test_clock_is_monotone_in_everything(steps, workers, step_seconds, delay, fused):
    kinds = [{}, {"all_reduce": (900.0, 3)}, {"permute": (500.0, 2)}]
    sends = Sends(kinds, steps)

    def clock(network=LINK, workers=workers, step=step_seconds, delay=delay, by=fused):
        return net.modelled_seconds(sends, network, workers, step, delay, by)

    usual, least = clock(), step_seconds * np.arange(1, len(steps) + 1)
    assert (np.diff(usual, prepend=0) >= step_seconds - 1e-9).all()
    no_faster = [
        clock(network=LINK._replace(bandwidth=500.0)),
        clock(network=LINK._replace(latency=0.5)),
        clock(workers=workers + 1),
        clock(step=step_seconds + 0.25),
        clock(by=False),
    ]
    no_slower = [clock(delay=delay + 1), clock(by=True), least]
    for other in no_faster:
        assert (other >= usual - 1e-9).all()
    for other in no_slower:
        assert (other <= usual + 1e-9).all()


def test_infinitely_fast_network_leaves_the_computation():
    ideal = Network("ideal", math.inf, 0.0)
    for delay in (0, 3):
        seconds = net.modelled_seconds(messages([5] * 4), ideal, 2, 0.5, delay)
        np.testing.assert_array_equal(seconds, [0.5, 1, 1.5, 2])


@pytest.mark.parametrize(("step_seconds", "message"), [(1.0, 3.0), (3.0, 1.0)])
def test_long_delay_leaves_the_slower_of_computation_and_link(step_seconds, message):
    steps, delay = 200, 20
    seconds = net.modelled_seconds(
        messages([message] * steps), UNIT, 2, step_seconds, delay
    )[-1]
    slower = steps * max(step_seconds, message)
    # All but the first `delay` messages count, and the first step's computation.
    assert slower - delay * message <= seconds <= slower + step_seconds


# Which algorithms let their sends take a while: what the others did first shows in a
# worker's params so many steps after the first sync. Noise on one worker tells.


def steps_on_the_way(strategy, steps=12, taken=None, watched=0):
    noise = NOISE.copy()
    noise[:, 1 - watched] *= -7
    with jax.enable_x64(True):
        usual, other = (
            train(strategy, workers=2, steps=steps, noise=n) for n in (NOISE, noise)
        )
        params = unflatten(START)
        counted = communication(strategy, params, workers=2, steps=steps, taken=taken)
    changed = (usual.replicas[:, watched] != other.replicas[:, watched]).any(1)
    return np.argmax(changed) - np.argmax(counted.per_step > 0), changed.any()


CASES = {
    "sync_sgd": ("sync_sgd", {}),
    "diloco": ("diloco", {}),
    "streaming": ("streaming_diloco", {"fragments": 2}),
    "streaming, 1 step": ("streaming_diloco", {"fragments": 2, "delay": 1}),
    "streaming, 3 steps": ("streaming_diloco", {"fragments": 1, "delay": 3}),
    "eager": ("eager_diloco", {}),
    "eager, of 3 steps": ("eager_diloco", {"period": 3}),
    "overlap": ("overlap_local_sgd", {"period": 3}),
    "co2": ("co2", {"period": 3}),
    "low rank": ("diloco_x", {"period": 3}),
    "exponential graph": ("gossip", {}),
    "ring": ("gossip", {"topology": "ring"}),
    "gradient tracking": ("gradient_tracking", {}),
}
# Of workers that arrive together a later one starts from what the others did.
LATER = {"async_diloco": 1, "heloco": 1, "halos": 1}
REST = set(syncalgos.ALGORITHMS) - {name for name, _ in CASES.values()} - {"easgd"}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("name", "changes"), CASES.values(), ids=CASES)
def test_delay_is_the_one_with_which_sends_take_effect(name, changes):
    strategy = make(name, **changes)
    steps, is_seen = steps_on_the_way(strategy)
    assert is_seen
    assert strategy.late == steps


@pytest.mark.sample(0, slow=20)
@pytest.mark.parametrize("name", sorted(REST))
def test_all_other_algorithms_wait_for_what_they_send(name):
    steps, is_seen = steps_on_the_way(
        make(name), taken=owed(name).taken(12), watched=LATER.get(name, 0)
    )
    assert is_seen
    assert steps == make(name).late == 0


def test_easgd_waits_as_its_center_takes_effect_at_once():
    noise = NOISE.copy()
    noise[:, 1] *= -7
    usual, other = (
        train(make("easgd"), workers=2, noise=n).centers for n in (NOISE, noise)
    )
    first = parameters("easgd")["period"] - 1
    assert np.argmax((usual != other).any(1)) == first
    assert make("easgd").late == 0


@pytest.mark.parametrize(
    ("strategy", "late"),
    [
        (delayed(every(syncalgos.average(), 8), 5), 5),
        (every(syncalgos.average(), 8), 0),
        (chain(delayed(every(syncalgos.average(), 8), 5), syncalgos.sync_sgd()), 0),
        (syncalgos.streaming_diloco(8, fragments=2, delay=3), 3),
        (syncalgos.masked(Strategy(late=6), True), 6),
    ],
)
def test_a_strategy_declares_when_its_messages_are_used(strategy, late):
    assert strategy.late == late


# What others have published.


@pytest.mark.parametrize(
    "method",
    [
        x if x == "DiLoCo" else pytest.param(x, marks=pytest.mark.slow)
        for x in published.METHODS
    ],
)
def test_bandwidths_are_those_of_the_streaming_diloco_paper(method):
    """Table 4, on a grid of bandwidths a fifth apart."""
    given = published.MODELS["10B"], published.METHODS[method]
    modelled = published.bandwidths(*given, hidden=published.BACKWARD)
    rows = zip(published.METHODS, published.PUBLISHED["10B"], strict=True)
    told = dict(rows)[method]
    np.testing.assert_allclose(modelled[:4], told[:4], rtol=0.2)
