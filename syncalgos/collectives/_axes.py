"""The axes over which workers lie, and a worker's place along them.

An `axis` is the name of a mapped axis, a tuple of names with the outermost first, or
Peers, whose workers are processes that nothing maps.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from syncalgos import checks
from syncalgos.collectives import _peers
from syncalgos.collectives._peers import Peers

Axis = str | tuple[str, ...] | Peers

WORKERS: tuple[str, str] = ("devices", "lanes")
"""The axes over which `DataParallel` lays its workers, in row-major order."""

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


class Setting(Generic[Value]):
    """A value that all code sees that is traced inside a block, and that jit sees.

    `jax.jit`, `lax.scan` and `jax.checkpoint` keep what they traced. A plain context
    variable is no part of their keys: a user's jitted helper that was first traced
    outside of the block would be taken from there, with the value of there.
    """

    def __init__(self, name: str, default: Value) -> None:
        self._variable = ContextVar(name, default=default)
        self._trace_key = jax.make_user_context(None)

    def get(self) -> Value:
        """Returns the value of the innermost block, or the default."""
        return self._variable.get()

    @contextmanager
    def set_to(self, value: Value) -> Iterator[None]:
        """Sets the value for all code that is traced inside the block."""
        token = self._variable.set(value)
        try:
            with self._trace_key(_as_trace_key(value)):
                yield
        finally:
            self._variable.reset(token)


def _as_trace_key(value: Any) -> Any:
    """The value, or an object that equals no other where jit cannot hash the value."""
    try:
        hash(value)
    except TypeError:  # a traced array; the cache must not keep it, either
        return object()
    return value


COUNTED: Setting[tuple[str, ...]] = Setting("counted", ())
"""The axes over which all workers lie, while traffic is counted."""


ANALYZED: Setting[bool] = Setting("analyzed", False)
"""Whether code is traced only to be analyzed: WORKERS, mapped, then stand for Peers."""


def over_peers(peer_function: Callable[..., Any]) -> Callable[[Function], Function]:
    """Decorates a function of an axis: over Peers, another function is called.

    Args:
        peer_function: it takes the same arguments, and Peers as the axis.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        place = [*signature.parameters].index("axis")

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            axis = args[place] if len(args) > place else kwargs.get("axis")
            if not isinstance(axis, Peers):
                return function(*args, **kwargs)
            if not ANALYZED.get():
                return peer_function(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.arguments["axis"] = WORKERS
            return function(*bound.args, **bound.kwargs)

        return call  # type: ignore[return-value]  # the same type for its callers

    return decorate


def mapped_names(axis: Axis) -> tuple[str, ...]:
    """Returns the names of the axes to map where a strategy is analyzed."""
    if isinstance(axis, Peers):
        return WORKERS
    return (axis,) if isinstance(axis, str) else axis


def check_whole(operation: str, names: set[str], every: tuple[str, ...]) -> None:
    """Refuses some of the axes over which all workers lie, without the outermost.

    Raises:
        ValueError: how many workers lie along these axes is the layout's choice.
    """
    if names & {*every[1:]} and every[0] not in names:
        raise ValueError(
            f"{operation} over {sorted(names)} cannot be counted: only a layout tells "
            f"how many workers lie along a part of {every}; send over all of it"
        )


@over_peers(_peers.size)
def size(axis: Axis = WORKERS) -> int:
    """Returns the number of workers along the axis, a Python int.

    It can also be called outside a trace, wherever the axis is known.

    Raises:
        NameError: no axis of that name is mapped.
        ValueError: traffic is counted, and the axis is only a part of the workers'.
    """
    names = mapped_names(axis)
    for name in names:
        try:
            lax.axis_size(name)
        except NameError:
            if name in WORKERS:
                raise NameError(
                    f"unbound axis name: no axis {name!r} is mapped here; DataParallel "
                    "maps it: for an axis of your own, make the strategy with "
                    "axis='NAME' (and a reducer inside an optax transformation)"
                ) from None
            raise NameError(
                f"unbound axis name: no axis {name!r} is mapped here"
            ) from None
    check_whole("a collective", {*names}, COUNTED.get())
    return lax.axis_size(names)


def find_names(axis: Axis) -> tuple[str, ...]:
    """Returns the names of an axis, after checking that each is mapped and usable.

    Raises:
        NameError: no axis of that name is mapped.
        ValueError: shard_map was called without check_vma=False.
    """
    size(axis)
    names = mapped_names(axis)
    if any(jax.typeof(lax.axis_index(name)).mat.varying for name in names):
        raise ValueError(
            "call jax.shard_map with check_vma=False: with its check on, jax.grad adds "
            "up the gradients of all devices, and no step is local"
        )
    return names


def trace_over(
    function: Callable[[Any], Any], tree: Any, axis: Axis
) -> tuple[Any, set[str]]:
    """Traces a function so that its jaxpr shows what is sent over an axis.

    Args:
        function: a tree -> any tree.
        tree: arrays.
        axis: the mapped axis or axes over which the workers lie.

    Returns:
        The jaxpr, and the names of the axes along which it sends to other workers.
    """
    if isinstance(axis, Peers) and not ANALYZED.get():
        # Callbacks show no axis; the mapped axes that stand for processes are shown.
        axis_sizes = [*zip(mapped_names(axis), (1, axis.size), strict=True)]
        with ANALYZED.set_to(True):
            jaxpr = jax.make_jaxpr(function, axis_env=axis_sizes)(tree)
        return jaxpr, {*mapped_names(axis)}
    return jax.make_jaxpr(function)(tree), {*find_names(axis)}


def several(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the names of axes with more than one worker."""
    # XLA keeps an all-reduce over a single worker, and copies the arrays for it.
    return tuple(name for name in names if lax.axis_size(name) > 1)


@over_peers(_peers.index)
def index(axis: Axis = WORKERS) -> jax.Array:
    """Returns this worker's number, an int32 scalar, from 0 in row-major order."""
    names = several(find_names(axis))
    return lax.axis_index(names) if names else jnp.int32(0)


def platform() -> str:
    """Returns the platform of the devices for which a program is traced.

    It is "cpu", "gpu" or "tpu". Some operations are fast on one and slow on another,
    such as sums over a leading axis, or draws in a loop.
    """
    # A program may be compiled on a machine without its devices.
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.platform if device else jax.default_backend()


_SAME_NUMBER = Primitive("same_on_all_workers")
"""Returns its number, which no vmap over the workers may map."""
_SAME_NUMBER.def_impl(lambda number, names: number)
_SAME_NUMBER.def_abstract_eval(lambda number, names: number)
mlir.register_lowering(
    _SAME_NUMBER,
    mlir.lower_fun(lambda number, names: number, multiple_results=False),
)


def _refuse_mapped(
    axis_data: Any, numbers: tuple[Any], dimensions: tuple[Any], names: tuple[str, ...]
) -> tuple[Any, Any]:
    """Maps a number along an axis on which no workers lie, such as one of seeds."""
    if dimensions[0] is not None and axis_data.name in names:
        raise ValueError(
            "the local step differs between workers: jax.vmap maps it over "
            f"{axis_data.name!r}; a strategy takes one step for all workers: give it "
            "in_axes None"
        )
    return _SAME_NUMBER.bind(*numbers, names=names), dimensions[0]


batching.fancy_primitive_batchers[_SAME_NUMBER] = _refuse_mapped


def same_on_all(number: Any, axis: Axis) -> Any:
    """Returns a step, or an index, that `jax.vmap` may not map over the workers.

    Of a mapped one, each worker would take its own branch, and some would send to
    workers that do not listen. The engine's own steps are never mapped.

    Args:
        number: an integer scalar, traced or not.
        axis: the mapped axis or axes over which the workers lie.

    Raises:
        ValueError: a vmap over the workers maps the number; raised when it is traced.
    """
    is_engines = isinstance(axis, Peers) or axis == WORKERS or COUNTED.get()
    if is_engines or not checks.is_traced(number):
        return number
    return _SAME_NUMBER.bind(number, names=mapped_names(axis))
