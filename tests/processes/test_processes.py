"""The engine in several real processes, against one process with as many devices.

Sums of two workers have one order: two processes of one device give the numbers of
one process with two devices bit for bit. Of more, gloo adds in another order than XLA
does within a process, and float64 shows that nothing else differs.
"""

import itertools
import json
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
import pytest
from support.commands import CACHE, members
from support.engine_work import HALF, ProcessResults, host, take_steps
from support.problems import drawing
from support.tiers import tiers

from syncalgos._engine.placement.make_layout import BACKENDS
from syncalgos._keys import is_key

ROUNDING = 1e-12  # of float64 after 8 steps: sums of workers in another order


class Group(NamedTuple):
    """Processes that are started together.

    Attributes:
        processes: the number of processes.
        devices: of each.
        work: what they do, in turn: see `work`.
        is_float64: whether floats have 64 bits.
    """

    processes: int
    devices: int
    work: tuple[str, ...]
    is_float64: bool = True


def work(name, **arguments):
    """A function of engine_work.py and its arguments."""
    return json.dumps([name, arguments])


def execute(group, folder):
    """Returns the results of each piece of work, for each process."""
    folder.joinpath("work.json").write_text(f"[{','.join(group.work)}]")
    members(
        "engine_work",
        group.processes,
        folder,
        seconds=180 + 20 * len(group.work),
        JAX_ENABLE_X64=int(group.is_float64),
        JAX_NUM_CPU_DEVICES=group.devices,
        **{CACHE: "false"},  # one process would find what the others compile
    )
    paths = [folder / f"{i}.pickle" for i in range(group.processes)]
    process_results = [pickle.loads(path.read_bytes()) for path in paths]
    return [dict(zip(group.work, results, strict=True)) for results in process_results]


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
    actual_leaves, form = jax.tree_util.tree_flatten_with_path(actual)
    expected_leaves, expected_form = jax.tree_util.tree_flatten_with_path(expected)
    assert form == expected_form
    for (path, x), (_, y) in zip(actual_leaves, expected_leaves, strict=True):
        name = jax.tree_util.keystr(path)
        x = np.asarray(x)
        y = np.asarray(y)
        assert (x.shape, x.dtype) == (y.shape, y.dtype), name
        near = rounding if x.dtype == np.float64 else 0
        np.testing.assert_allclose(x, y, rtol=near, atol=near, err_msg=name)


def joined(parts):
    """Joins the results of all workers; the processes must agree on shared values."""
    for other in parts[1:]:
        assert_same(other.common, parts[0].common)
    ordered = sorted(parts, key=lambda x: x.workers[0])
    workers = [*itertools.chain.from_iterable(x.workers for x in ordered)]
    assert workers == list(range(len(workers)))
    worker_values = jax.tree.map(
        lambda *xs: np.concatenate(xs), *(x.worker_values for x in ordered)
    )
    return ProcessResults(parts[0].common, worker_values, workers)


def run_both(start, several, single, piece):
    """The results of several processes and of one, run at the same time."""
    futures = start(several), start(single)
    joined_results = []
    for future in futures:
        joined_results.append(joined([results[piece] for results in future.result()]))
    return joined_results


# Processes, their devices, a backend: two workers on each device.
LAYOUTS = [(2, 1, "pmap"), (4, 1, "shard_map")]


@pytest.mark.parametrize("layout", tiers(LAYOUTS, slow=LAYOUTS[:1]), ids=str)
def test_algorithms_give_the_numbers_of_one_process(start, layout):
    processes, devices, backend = layout
    num_devices = processes * devices
    todo = (work("algorithms", backend=backend, workers=2 * num_devices),)
    several = Group(processes, devices, todo)
    single = Group(1, num_devices, todo)
    # Joined for sending, leaves are computed by other programs than in one process.
    assert_same(*run_both(start, several, single, *todo), ROUNDING)


# For two processes of two devices each: a backend, what, workers, devices. With the
# first device of each, a sum has one order. REORDERED starts with the last process,
# and in it with its last device.
FIRST_DEVICES = [0, 2]
REORDERED = [3, 2, 1, 0]
ENGINE = {
    "draws-reordered": ("pmap", "of_draws", 8, REORDERED),
    "tables": ("pmap", "of_tables", 4, FIRST_DEVICES),
    "debugged": ("shard_map", "debugged", 4, FIRST_DEVICES),
    "draws-on-all": ("shard_map", "of_draws", 8, None),
    "tables-on-all": ("shard_map", "of_tables", 4, None),
}
ALONE = {backend: work("alone", backend=backend, rounds=[1, 2]) for backend in BACKENDS}
REFUSALS = work("refusals")  # by processes of their own


def engine_piece(name):
    backend, function, workers, devices = ENGINE[name]
    return work(function, backend=backend, workers=workers, devices=devices)


def engine_groups(backend):
    """Several processes, which do more, and one."""
    todo = tuple(engine_piece(name) for name, x in ENGINE.items() if x[0] == backend)
    alone = ("shard_map",) if backend == "shard_map" else ("pmap", "vmap")
    return Group(2, 2, (*todo, *(ALONE[x] for x in alone))), Group(1, 4, todo)


@pytest.mark.parametrize("name", tiers(ENGINE, slow=["draws-reordered", "tables"]))
def test_engine_gives_the_numbers_of_one_process(start, name):
    """Keys, buffers, metrics, microbatches, tables, debugging."""
    several, single = engine_groups(ENGINE[name][0])
    assert_same(*run_both(start, several, single, engine_piece(name)), ROUNDING)


@pytest.mark.parametrize("backend", tiers(BACKENDS, slow=["pmap"]))
def test_process_on_its_own_devices_trains_alone(start, backend):
    """One goes on when the other has ended, which no collective would outlast."""
    several, _ = engine_groups("shard_map" if backend == "shard_map" else "pmap")
    pieces = [work("alone", backend=b, rounds=[2]) for b in ALONE]
    futures = start(several), start(Group(1, 2, tuple(pieces)))
    results_of_two, [results_of_one] = (future.result() for future in futures)
    expected = results_of_one[work("alone", backend=backend, rounds=[2])]
    assert_same(results_of_two[0][ALONE[backend]], expected[:1])
    assert_same(results_of_two[1][ALONE[backend]], expected)


REFUSED = {
    "vmap": r"'vmap' runs on one device, but there are 2 processes: use pmap or",
    "vmap on devices of two": "'vmap' runs on one device, got 2",
    "workers": "3 workers do not divide over 2 processes: use a multiple of 2",
    "devices that interleave": r"must be grouped by process.* processes \[0, 1, 0, 1\]",
    "uneven devices": r"equally many of each process, got .* processes \[0, 0, 1\]",
    "devices elsewhere": r"got none of process (0|1)$",
    "batch": "batch of 14 does not divide over 4 workers: use a multiple of 4, such as",
    "batch of one alone": "batch of 6 does not divide over 4 workers",
    "workers of another number": (
        r"held\.replica\.params\['bias'\] has shape \(4.*\), but .* the 2 workers"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_what_processes_cannot_do_is_refused_in_one_line(start, name):
    for results in start(Group(2, 2, (REFUSALS,))).result():
        kind, message, compiled = results[REFUSALS][name]
        assert (kind, compiled) == ("ValueError", 0)
        assert "\n" not in message
        with pytest.raises(ValueError, match=REFUSED[name]):
            raise ValueError(message)


@pytest.mark.parametrize("backend", tiers(["pmap", "shard_map"], slow=["shard_map"]))
def test_processes_go_on_from_orbax(start, tmp_path, backend):
    """Typed keys, the step and the key are saved, too; half of the devices will do."""
    pytest.importorskip("orbax.checkpoint")
    piece = work("restore_from_orbax", backend=backend, folder=str(tmp_path))
    results = [
        process_results[piece]
        for process_results in start(Group(2, 2, (piece,))).result()
    ]
    unbroken, resumed, saved, moved = map(joined, zip(*results, strict=True))
    assert_same(resumed, unbroken)
    assert_same(moved, saved)


@pytest.mark.parametrize("backend", tiers(BACKENDS, slow=["pmap"]))
def test_one_process_goes_on_from_the_host_with_nothing_compiled(backend):
    trainer = drawing.make_trainer(backend, 4, [0] if backend == "vmap" else [0, 1])
    halves = [take_steps(drawing.make_batches(), n, n + HALF) for n in (0, HALF)]
    state, _ = trainer.run(drawing.start(trainer), halves[0])
    host_state = trainer.to_host(state)
    for leaf in jax.tree.leaves((host_state.replica, host_state.sync)):
        assert is_key(leaf) or isinstance(leaf, np.ndarray)
        assert leaf.shape[0] == 4
    in_order = np.reshape(state.replica.params["kernel"], (4, 3, 4))
    np.testing.assert_array_equal(host_state.replica.params["kernel"], in_order)
    unbroken = trainer.run(state, halves[1])
    seconds = trainer.compile_seconds
    assert_same(
        *(
            host(run)
            for run in (trainer.run(trainer.from_host(host_state), halves[1]), unbroken)
        )
    )
    assert trainer.compile_seconds == seconds
    fewer = jax.tree.map(lambda x: x[:3], host_state.replica)
    with pytest.raises(ValueError, match=r"held\.replica\.\S* has shape \(3.*\), but"):
        trainer.from_host(host_state._replace(replica=fewer))
