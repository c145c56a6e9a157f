"""Workers that are Peers: a transport over threads, a problem, and the reference."""

import inspect
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import syncalgos
from syncalgos import strategy as contract

WORKERS = 3
STEPS = 20
PERIOD = 4
RATE = 0.05
FEATURES = 6
OUTPUTS = 3
TIMEOUT = 60  # seconds


class PeerRun(NamedTuple):
    """What one worker, or DataParallel for all of them, ends with.

    Attributes:
        params: the worker's own; those of DataParallel have a first axis of workers.
        center: the center.
        sent_bytes: what the transport counted until the end of each step, (steps,).
    """

    params: Any
    center: Any
    sent_bytes: np.ndarray


class Meeting:
    """Where the threads of a run meet."""

    def __init__(self, workers: int):
        self.barrier = threading.Barrier(workers)
        self.board: list[Any] = [None] * workers
        self.mailboxes: defaultdict[tuple[int, int], Queue[Any]] = defaultdict(Queue)


class Threads:
    """The transport of one of several threads that meet at a barrier.

    Attributes:
        sent_bytes: what this thread has sent, an all-reduce as by a ring.
    """

    def __init__(self, rank: int, meeting: Meeting):
        self.rank = rank
        self.size = meeting.barrier.parties
        self.sent_bytes = 0.0
        self._barrier = meeting.barrier
        self._board = meeting.board
        self._mailboxes = meeting.mailboxes

    def meet(self) -> None:
        """Waits for all threads."""
        self._barrier.wait(TIMEOUT)

    def _exchange(self, message: Any) -> list[Any]:
        """Returns the messages of all threads."""
        self._board[self.rank] = message
        self.meet()
        messages = [*self._board]
        self.meet()
        return messages

    def all_gather(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        self.sent_bytes += (self.size - 1) * sum(x.nbytes for x in arrays)
        assert all(x.dtype == np.uint8 and x.ndim == 1 for x in arrays)
        return [np.stack(rows) for rows in zip(*self._exchange(arrays), strict=True)]

    def all_reduce(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        share = 2 * (self.size - 1) / self.size
        self.sent_bytes += share * sum(x.nbytes for x in arrays)
        columns = zip(*self._exchange(arrays), strict=True)
        return [np.sum(rows, axis=0, dtype=rows[0].dtype) for rows in columns]

    def send_receive(
        self, arrays: list[np.ndarray], to: int, source: int
    ) -> list[np.ndarray]:
        self.sent_bytes += sum(x.nbytes for x in arrays)
        self._mailboxes[self.rank, to].put(arrays)
        return self._mailboxes[source, self.rank].get(timeout=TIMEOUT)


class Gathering(Threads):
    """A transport without send_receive."""

    send_receive = property()  # type: ignore[assignment]  # hasattr is False


def over_threads(
    work: Callable[[Any], Any], workers: int = WORKERS, kind: type[Threads] = Threads
) -> list[Any]:
    """Runs a function of a transport in a thread for each worker."""
    meeting = Meeting(workers)
    errors: list[BaseException] = []

    def work_or_abort(rank: int) -> Any:
        try:
            return work(kind(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.barrier.abort()

    with ThreadPoolExecutor(workers) as pool:
        results = [*pool.map(work_or_abort, range(workers))]
    if errors:  # the others only follow from the first
        raise errors[0]
    return results


def make_strategy(name: str, **kwargs: Any) -> syncalgos.Strategy:
    """Makes an algorithm with a period of 4, and a learning rate where it needs one."""
    algorithm = syncalgos.ALGORITHMS[name]
    parameters = inspect.signature(algorithm).parameters
    if "period" in parameters:
        kwargs["period"] = PERIOD
    rate = parameters.get("learning_rate")
    if rate is not None and rate.default is rate.empty:
        kwargs["learning_rate"] = RATE
    return algorithm(**kwargs)


def make_optimizer(strategy: syncalgos.Strategy) -> Any:
    """Makes SGD with momentum, or without where the strategy takes steps of its own."""
    return optax.sgd(RATE, momentum=None if strategy.own_steps else 0.9)


def make_batches(workers: int = WORKERS) -> np.ndarray:
    """Makes one example for each step and worker, (steps, workers, features)."""
    shape = STEPS, workers, FEATURES
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def make_params(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    weights = np.linspace(-1, 1, OUTPUTS * FEATURES).reshape(OUTPUTS, FEATURES)
    return {"w": weights.astype(dtype), "b": np.zeros(OUTPUTS, dtype)}


def loss(params: Any, batch: jax.Array) -> jax.Array:
    outputs = batch @ params["w"].T + params["b"]
    return (outputs.astype(jnp.float32) ** 2).mean()


def make_step(strategy: syncalgos.Strategy, optimizer: Any) -> Any:
    """Makes one worker's step, which a program in its own process group would write."""

    @jax.jit
    def take_step(replica: Any, state: Any, step: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(replica.params, batch)
        if strategy.sees_loss:
            replica = replica._replace(loss=value)
        grads, state = contract.apply_reduce(strategy, grads, replica, state, step)
        updates, opt_state = optimizer.update(grads, replica.opt_state, replica.params)
        params = optax.apply_updates(replica.params, updates)
        replica = replica._replace(params=params, opt_state=opt_state)
        replica, state = contract.apply_sync(strategy, replica, state, step)
        return replica._replace(loss=()), state

    return take_step


def compile_first(transport: Any, function: Callable[..., Any], *args: Any) -> Any:
    """Compiles a worker's function, and waits until all workers have.

    In one process, the callbacks of some workers would block the threads with which XLA
    compiles the program of another.
    """
    compiled = jax.jit(lambda *args: function(*args)).lower(*args).compile()
    transport.meet()
    return compiled


def train_over(
    transport: Any, make: Callable[..., syncalgos.Strategy], dtype: Any = np.float32
) -> PeerRun:
    """Trains one worker over a transport."""
    peers = syncalgos.Peers(transport)
    strategy = make(axis=peers)
    optimizer = make_optimizer(strategy)
    params = jax.tree.map(jnp.asarray, make_params(dtype))
    replica = syncalgos.Replica(params, optimizer.init(params))
    state = strategy.init(params)
    batches = make_batches(transport.size)
    example = replica, state, np.int32(0), batches[0, 0]
    take_step = compile_first(transport, make_step(strategy, optimizer), *example)
    compute_center = compile_first(transport, strategy.center, params, state)
    sent_bytes = []
    for step in range(STEPS):
        batch = batches[step, transport.rank]
        replica, state = peers.run(take_step, replica, state, np.int32(step), batch)
        sent_bytes.append(transport.sent_bytes)
    center = peers.run(compute_center, replica.params, state)
    return PeerRun(*jax.device_get((replica.params, center)), np.array(sent_bytes))


def train_by_data_parallel(
    make: Callable[..., syncalgos.Strategy],
    workers: int = WORKERS,
    dtype: Any = np.float32,
) -> PeerRun:
    """Trains all workers in one program; the bytes are those of `communication`."""
    strategy = make()
    optimizer = make_optimizer(strategy)
    trainer = syncalgos.DataParallel(
        loss,
        optimizer,
        strategy,
        workers=workers,
        placement=syncalgos.Placement(devices=[0]),
    )
    state = trainer.init(make_params(dtype))
    state, metrics = trainer.run(state, make_batches(workers))
    traffic = trainer.communication(state, steps=STEPS, taken=metrics.get("decided"))
    params = jax.tree.map(
        lambda x: np.reshape(x, (workers, *x.shape[2:])),
        jax.device_get(state.replica.params),
    )
    center = jax.device_get(trainer.center(state).params)
    return PeerRun(params, center, traffic.per_step)


def count_largest_sends(runs: Sequence[PeerRun]) -> np.ndarray:
    """Adds up what the worker that sends the most sends in each step, (steps,)."""
    per_step = [np.diff(run.sent_bytes, prepend=0) for run in runs]
    return np.cumsum(np.max(per_step, axis=0))


def difference(runs: Sequence[PeerRun], expected: PeerRun) -> float:
    """The largest difference of the workers' params and centers."""
    differences = []
    for rank, run in enumerate(runs):
        for name, x in run.params.items():
            differences.append(np.abs(x - expected.params[name][rank]).max())
            center = expected.center[name]
            differences.append(np.abs(run.center[name] - center).max())
    return float(max(differences))
