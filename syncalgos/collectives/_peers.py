"""An axis whose workers are processes that another library has joined.

    peers = syncalgos.Peers(transport)
    strategy = syncalgos.diloco(20, axis=peers)

Each process holds one worker, calls the strategy's functions on its own replica, jitted
or not, and makes the same calls in the same order as all others. What is sent leaves
the program through ordered callbacks to the host, as NumPy arrays; nothing is mapped,
and `jax.distributed` is not needed. A transport is an adapter of about 20 lines:
`Transport` says what it has. `Peers.run` calls a step, and turns what the transport
raised in it into one line, a TransportError.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback

from syncalgos import checks

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
HostFunction = Callable[..., Sequence[np.ndarray]]
"""NumPy arrays -> the NumPy arrays that arrived; it calls the transport."""

# jax.jit keeps what it traced of a function, even through a new `jax.jit` of it. With
# these in its key, it traces again where they change.
_RANK_AND_SIZE = jax.make_user_context(None)


class Transport(Protocol):
    """Processes that exchange NumPy arrays; each makes the same calls in one order.

    All arrays are flat, contiguous and not empty, and the transport may change them.
    Small arrays arrive joined. A transport waits for its peers, and raises an error
    when it has waited for too long.

    It may also have `send_receive(arrays, to, source)`: it sends arrays to process
    `to`, and returns as many of the same sizes and dtypes from process `source`, which
    may be the same one. Without it, shifts and exchanges gather from all processes.

    Attributes:
        rank: this process's number, from 0.
        size: the number of processes.

    Example:
        >>> import numpy as np
        >>> class Alone:  # a single process
        ...     rank, size = 0, 1
        ...     def all_gather(self, arrays):
        ...         return [x[None] for x in arrays]
        ...     def all_reduce(self, arrays):
        ...         return arrays
        >>> from syncalgos import Peers
        >>> Peers(Alone()).size
        1
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_gather(self, arrays: list[np.ndarray]) -> Sequence[np.ndarray]:
        """Gathers every process's arrays.

        Args:
            arrays: uint8 arrays (n,), whatever the dtype that they stand for.

        Returns:
            uint8 arrays (size, n), with a row for each process in the order of ranks.
        """
        ...

    def all_reduce(self, arrays: list[np.ndarray]) -> Sequence[np.ndarray]:
        """Adds up arrays over the processes, with the same bits in all of them.

        Args:
            arrays: arrays (n,) of the params' dtype: float32, or float64, bfloat16 (the
                dtype of ml_dtypes) or float16.

        Returns:
            The sums, arrays (n,) of the same dtypes.
        """
        ...


class TransportError(RuntimeError):
    """The transport of Peers failed, as when a peer is lost; its message is one line.

    The error that the transport raised is its `__cause__`. The arrays from which the
    step was computed are still good.

    Example:
        >>> import jax.numpy as jnp
        >>> import syncalgos
        >>> class Cut:  # the other process is lost
        ...     rank, size = 0, 2
        ...     def all_gather(self, arrays):
        ...         raise ConnectionError("reset by peer")
        ...     all_reduce = all_gather
        >>> peers = syncalgos.Peers(Cut())
        >>> try:
        ...     peers.run(syncalgos.collectives.mean, jnp.ones(2), peers)
        ... except syncalgos.TransportError as error:
        ...     print(str(error)[:67])
        all_reduce among 2 processes failed (ConnectionError: reset by peer
    """


@dataclass
class _Watch:
    """Whether `Peers.run` waits for a step, and the first error in that step."""

    is_on: bool = False
    error: TransportError | None = None


@dataclass(frozen=True, eq=False)
class Peers:
    """An axis of processes that a transport joins, one worker in each.

    Every argument `axis` takes it in place of the name of a mapped axis. Make one, and
    give it to all parts of a strategy. `DataParallel` and `stacked`, which hold all
    workers themselves, refuse it; `communication` and `describe` do not use the
    transport, and answer as for any other axis.

    The rank and the size are read when a step is traced. Where they change, `run` has a
    jitted step traced again; one that is called without `run` keeps the old ones.

    Attributes:
        transport: what joins the processes; see `Transport`.

    Raises:
        ValueError: the transport lacks a method, or its rank is none of its size.

    Example:
        >>> import jax.numpy as jnp
        >>> import numpy as np
        >>> import syncalgos
        >>> class Twins:  # as if another process held the same values
        ...     rank, size = 0, 2
        ...     def all_gather(self, arrays):
        ...         return [np.stack([x, x]) for x in arrays]
        ...     def all_reduce(self, arrays):
        ...         return [x + x for x in arrays]
        >>> peers = syncalgos.Peers(Twins())
        >>> strategy = syncalgos.model_averaging(1, axis=peers)
        >>> replica = syncalgos.Replica(jnp.array([1.0, 3.0]))
        >>> state = strategy.init(replica.params)
        >>> replica, state = peers.run(strategy.sync, replica, state, 0)
        >>> replica.params
        Array([1., 3.], dtype=float32)
    """

    transport: Transport
    _watch: _Watch = field(default_factory=_Watch, init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("rank", "size", "all_gather", "all_reduce"):
            if not hasattr(self.transport, name):
                raise ValueError(
                    f"Peers: a transport needs rank, size, all_gather and all_reduce, "
                    f"but {checks.shown(self.transport)} has no {name}"
                )
        size = checks.whole("Peers: size of the transport", self.size, least=1)
        rank = checks.whole("Peers: rank of the transport", self.rank, least=0)
        if rank >= size:
            raise ValueError(
                f"Peers: rank of the transport must be less than its size, {size}, "
                f"got {rank}"
            )

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.transport.rank

    @property
    def size(self) -> int:
        """The number of processes."""
        return self.transport.size

    def run(
        self,
        function: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Calls a function that sends, such as a jitted step, and waits for its result.

        After an error of the transport nothing more is sent in the call, and its result
        is dropped. A step that is called without `run` raises jax's own error, which
        shows a traceback of the callback.

        Args:
            function: the function; it must not donate the arrays that are to survive.
            args: its arguments by position.
            kwargs: its arguments by name.

        Returns:
            What the function returns.

        Raises:
            TransportError: the transport failed.
        """
        watch = self._watch
        watch.is_on = True
        watch.error = None
        try:
            with _RANK_AND_SIZE((self.rank, self.size)):
                result = jax.block_until_ready(function(*args, **kwargs))
            jax.effects_barrier()
        except Exception:
            if watch.error is not None:  # from what stands for the result
                raise watch.error from watch.error.__cause__
            raise
        finally:
            watch.is_on = False
        if watch.error is not None:
            raise watch.error
        return result


def call_on_host(
    peers: Peers,
    method: str,
    function: HostFunction,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
) -> list[jax.Array]:
    """Calls a function of NumPy arrays on the host when the program runs.

    Args:
        peers: the processes, all of which must call it.
        method: the transport's method that it calls, for messages.
        function: the function.
        operands: what it is called with.
        results: the shapes and dtypes of what it returns.
    """
    watch = peers._watch

    def call(*arrays: Any) -> list[np.ndarray]:
        empty_results = [np.zeros(x.shape, x.dtype) for x in results]
        if watch.is_on and watch.error is not None:
            return empty_results
        try:
            return [*function(*map(np.asarray, arrays))]
        except Exception as cause:
            error = _make_error(peers, method, cause)
            if not watch.is_on:
                raise error from cause
            error.__cause__ = cause
            watch.error = error
            return empty_results

    return [*io_callback(call, [*results], *operands, ordered=True)]


def _make_error(peers: Peers, method: str, cause: Exception) -> TransportError:
    lines = str(cause).strip().splitlines() or [""]
    return TransportError(
        f"{method} among {peers.size} processes failed ({type(cause).__name__}: "
        f"{lines[0]}): a peer may be lost, or waits elsewhere; the arrays before this "
        "step are still good: join the processes again, and repeat the step with a "
        "strategy over Peers of the new transport"
    )


def size(axis: Peers) -> int:
    """`collectives.size` of processes."""
    return axis.size


def index(axis: Peers) -> jax.Array:
    """`collectives.index` of processes."""
    return jnp.int32(axis.rank)
