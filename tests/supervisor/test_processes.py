"""The engine in several real processes, against one process with as many devices.

Sums of two workers have one order: two processes of one device give the numbers of
one process with two devices bit for bit. Of more, gloo adds in another order than XLA
does within a process, and float64 shows that nothing else differs.
"""

import json
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
import pytest
from commands import CACHE, members
from in_process import HALF, STEPS, Seen, host, taken
from problems import drawing
from tiers import tiers

from syncalgos.engine.placement.make_layout import BACKENDS
from syncalgos.keys import is_key

ROUNDING = 1e-12  # of float64 after 8 steps: sums of workers in another order


class Group(NamedTuple):
    """Processes that are started together.

    Attributes:
        processes: the number of processes.
        devices: of each.
        work: what they do, in turn: see `work`.
        wide: whether floats have 64 bits.
    """

    processes: int
    devices: int
    work: tuple[str, ...]
    wide: bool = True


def work(what, **arguments):
    """A function of in_process.py and its arguments."""
    return json.dumps([what, arguments])


def execute(group, folder):
    """Returns the results of each piece of work, for each process."""
    folder.joinpath("work.json").write_text(f"[{','.join(group.work)}]")
    members(
        "in_process",
        group.processes,
        folder,
        seconds=180 + 20 * len(group.work),
        JAX_ENABLE_X64=int(group.wide),
        JAX_NUM_CPU_DEVICES=group.devices,
        **{CACHE: "false"},  # one process would find what the others compile
    )
    paths = [folder / f"{i}.pickle" for i in range(group.processes)]
    found = [pickle.loads(path.read_bytes()) for path in paths]
    return [dict(zip(group.work, each, strict=True)) for each in found]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Starts each group once: group -> a future of what its processes saw."""
    started: dict[Group, Future] = {}
    with ThreadPoolExecutor() as pool:

        def start(group):
            if group not in started:
                folder = tmp_path_factory.mktemp("group")
                started[group] = pool.submit(execute, group, folder)
            return started[group]

        yield start


def assert_same(actual, expected, rounding=0.0):
    left, form = jax.tree_util.tree_flatten_with_path(actual)
    right, expected_form = jax.tree_util.tree_flatten_with_path(expected)
    assert form == expected_form
    for (path, x), (_, y) in zip(left, right, strict=True):
        name, x, y = jax.tree_util.keystr(path), np.asarray(x), np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        near = rounding if x.dtype == np.float64 else 0
        np.testing.assert_allclose(x, y, rtol=near, atol=near, err_msg=name)


def joined(parts):
    """Joins the results of all workers; the processes must agree on shared values."""
    for other in parts[1:]:
        assert_same(other.common, parts[0].common)
    ordered = sorted(parts, key=lambda x: x.workers[0])
    workers = [number for each in ordered for number in each.workers]
    assert workers == list(range(len(workers)))
    own = jax.tree.map(lambda *xs: np.concatenate(xs), *(x.own for x in ordered))
    return Seen(parts[0].common, own, workers)


def both(start, several, one, piece):
    """The results of several processes and of one, run at the same time."""
    futures = start(several), start(one)
    return [joined([found[piece] for found in each.result()]) for each in futures]


# Processes, their devices, a backend: two workers on each device.
LAYOUTS = [(2, 1, "pmap"), (4, 1, "shard_map"), (2, 2, "shard_map")]


@pytest.mark.parametrize("layout", tiers(LAYOUTS, slow=LAYOUTS[:2]), ids=str)
def test_algorithms_give_the_numbers_of_one_process(start, layout):
    processes, devices, backend = layout
    in_all = processes * devices
    todo = (work("algorithms", backend=backend, workers=2 * in_all),)
    several, one = Group(processes, devices, todo), Group(1, in_all, todo)
    # Joined for sending, leaves are computed by other programs than in one process.
    assert_same(*both(start, several, one, *todo), ROUNDING)


# For two processes of two devices each: what, workers, devices. With the first device
# of each, a sum has one order. REORDERED starts with the last process, and in it with
# its last device.
FIRST, REORDERED = [0, 2], [3, 2, 1, 0]
ENGINE = {
    "debugged": ("debugged", 4, FIRST),
    "rows": ("of_rows", 4, FIRST),
    "draws-reordered": ("of_draws", 8, REORDERED),
    "draws-on-all": ("of_draws", 8, None),
    "tables": ("of_tables", 4, FIRST),
    "tables-reordered": ("of_tables", 4, REORDERED),
    "tables-on-all": ("of_tables", 4, None),
}
FAST = ("rows", "draws-reordered", "tables")
ALONE = {backend: work("alone", backend=backend, rounds=[1, 2]) for backend in BACKENDS}
MESHED = work("of_meshes")
REFUSALS = work("refusals")  # by processes of their own, as only they are not slow


def engine_piece(backend, name):
    what, workers, devices = ENGINE[name]
    return work(what, backend=backend, workers=workers, devices=devices)


def engine_groups(backend, fast):
    """Several processes, which do more, and one."""
    names = [name for name in ENGINE if name in FAST or not fast]
    todo = tuple(engine_piece(backend, name) for name in names)
    more = (ALONE["pmap"], ALONE["vmap"]) if fast else (ALONE["shard_map"],)
    if (backend, fast) == ("shard_map", False):
        todo = (*todo, MESHED)
    return Group(2, 2, todo + more), Group(1, 4, todo)


def cases_of_the_engine():
    for backend in ("pmap", "shard_map"):
        for name in ENGINE:
            fast = backend == "pmap" and name in FAST
            marks = pytest.mark.slow if fast else pytest.mark.long
            yield pytest.param(backend, name, fast, id=f"{backend}-{name}", marks=marks)


@pytest.mark.parametrize(("backend", "name", "fast"), list(cases_of_the_engine()))
def test_engine_gives_the_numbers_of_one_process(start, backend, name, fast):
    """Keys, buffers, metrics, microbatches, placed data, tables, debugging."""
    several, one = engine_groups(backend, fast)
    found = both(start, several, one, engine_piece(backend, name))
    assert_same(*found, ROUNDING)


@pytest.mark.long
def test_workers_that_are_meshes_may_lie_in_a_process_or_span_several(start):
    several, one = (start(x) for x in engine_groups("shard_map", fast=False))
    (whole,) = one.result()
    for each in several.result():
        assert_same(each[MESHED], whole[MESHED], ROUNDING)
        for again, unbroken in [
            x for x in each[MESHED].values() if isinstance(x, list)
        ]:
            np.testing.assert_array_equal(again, unbroken)


@pytest.mark.parametrize("backend", tiers(BACKENDS, slow=["shard_map"]))
def test_process_on_its_own_devices_trains_alone(start, backend):
    """One goes on when the other has ended, which no collective would outlast."""
    fast = backend != "shard_map"
    several, _ = engine_groups("pmap" if fast else backend, fast)
    pieces = [work("alone", backend=b, rounds=[2]) for b in ALONE]
    futures = start(several), start(Group(1, 2, tuple(pieces)))
    apart, [whole] = (future.result() for future in futures)
    expected = whole[work("alone", backend=backend, rounds=[2])]
    assert_same(apart[0][ALONE[backend]], expected[:1])
    assert_same(apart[1][ALONE[backend]], expected)


REFUSED = {
    "vmap": r"'vmap' runs on one device, but there are 2 processes: use pmap or",
    "vmap on devices of two": "'vmap' runs on one device, got 2",
    "workers": "3 workers do not divide over 2 processes: use a multiple of 2",
    "devices that interleave": r"must be grouped by process.* processes \[0, 1, 0, 1\]",
    "uneven devices": r"equally many of each process, got .* processes \[0, 0, 1\]",
    "devices elsewhere": r"got none of process (0|1)$",
    "batch": "batch of 14 does not divide over 4 workers: use a multiple of 4, such as",
    "batch to evaluate": "batch of 14 does not divide over 4 workers",
    "batch of one alone": "batch of 6 does not divide over 4 workers",
    "microbatches": "3 examples of each of 4 workers do not divide into 2 microbatches",
    "workers of another number": (
        r"held\.replica\.params\['bias'\] has shape \(4.*\), but .* the 2 workers"
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_processes_cannot_do_is_refused_in_one_line(start, name):
    for found in start(Group(2, 2, (REFUSALS,))).result():
        kind, message, compiled = found[REFUSALS][name]
        assert (kind, compiled) == ("ValueError", 0)
        assert "\n" not in message
        with pytest.raises(ValueError, match=REFUSED[name]):
            raise ValueError(message)


@pytest.mark.long
def test_state_goes_on_in_another_layout(start, tmp_path):
    """From one process to two, and back to one: on two devices, and on one."""

    def ran(processes, devices, *pieces):
        found = start(Group(processes, devices, pieces)).result()
        return [joined([each[piece] for each in found]) for piece in pieces]

    def piece(held, first, stop, backend="pmap", devices=None):
        where = {"backend": backend, "workers": 4, "devices": devices}
        return work("go_on", held=held, first=first, stop=stop, **where)

    def kept(seen, name):
        path = tmp_path / name
        both_kinds = seen.own | seen.common
        fields = {x: both_kinds[x] for x in ("replica", "sync", "step", "key")}
        path.write_bytes(pickle.dumps(fields))
        return str(path)

    whole, before = ran(1, 2, piece(None, 0, STEPS), piece(None, 0, 3))
    [between] = ran(2, 1, piece(kept(before, "before"), 3, 6))
    last = kept(between, "between"), 6, STEPS
    layouts = ("shard_map", None), ("pmap", [0]), ("vmap", None)
    after = ran(1, 2, *(piece(*last, *layout) for layout in layouts))
    for each in after:
        assert_same(each.own, whole.own, ROUNDING)
        parts = [x.common["metrics"][0] for x in (before, between, each)]
        metrics = jax.tree.map(lambda *xs: np.concatenate(xs), *parts)
        assert_same(metrics, whole.common["metrics"][0], ROUNDING)
        for name in ("center", "divergence", "evaluation", "key", "step"):
            assert_same(each.common[name], whole.common[name], ROUNDING)


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map"], slow=["shard_map"]))
def test_processes_go_on_from_orbax(start, tmp_path, backend):
    """Typed keys, the step and the key are saved, too; half of the devices will do."""
    pytest.importorskip("orbax.checkpoint")
    piece = work("of_orbax", backend=backend, folder=str(tmp_path))
    found = [each[piece] for each in start(Group(2, 2, (piece,))).result()]
    unbroken, resumed, saved, moved = map(joined, zip(*found, strict=True))
    assert_same(resumed, unbroken)
    assert_same(moved, saved)


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_process_goes_on_from_the_host_with_nothing_compiled(backend):
    trainer = drawing.make_trainer(backend, 4, [0] if backend == "vmap" else [0, 1])
    halves = [taken(drawing.make_batches(), n, n + HALF) for n in (0, HALF)]
    state, _ = trainer.run(drawing.start(trainer), halves[0])
    held = trainer.to_host(state)
    for leaf in jax.tree.leaves((held.replica, held.sync)):
        assert is_key(leaf) or isinstance(leaf, np.ndarray)
        assert leaf.shape[0] == 4
    in_order = np.reshape(state.replica.params["kernel"], (4, 3, 4))
    np.testing.assert_array_equal(held.replica.params["kernel"], in_order)
    unbroken = trainer.run(state, halves[1])
    seconds = trainer.compile_seconds
    assert_same(
        *(
            host(each)
            for each in (trainer.run(trainer.from_host(held), halves[1]), unbroken)
        )
    )
    assert trainer.compile_seconds == seconds
    fewer = jax.tree.map(lambda x: x[:3], held.replica)
    with pytest.raises(ValueError, match=r"held\.replica\.\S* has shape \(3.*\), but"):
        trainer.from_host(held._replace(replica=fewer))
