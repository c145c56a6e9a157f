"""Checks the engine's arguments; an error names the argument that does not fit."""

import inspect
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from syncalgos import _optax_states, checks
from syncalgos._engine.losses import Loss, find_key_argument, has_key_third, stateless
from syncalgos._engine.placement.layout import Layout
from syncalgos._host_arrays import check_fits, check_ours
from syncalgos.collectives import PyTree


@contextmanager
def explained_trace() -> Iterator[None]:
    """Turns jax's errors while it traces a strategy into advice.

    These errors come from an unknown axis or from a Python `if` on a step.
    """
    try:
        yield
    except jax.errors.ConcretizationTypeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        user_frames = [frame for frame in frames if _is_users(frame)]
        if not user_frames:
            raise
        frame = user_frames[-1]
        raise ValueError(
            f"{frame.filename}:{frame.lineno}: `{frame.line}` needs a value that is "
            "unknown while jax traces a strategy: use every(…, schedule), jnp.where or "
            "lax.cond"
        ) from None
    except NameError as error:
        if "axis name" not in str(error):
            raise
        raise ValueError(
            f"{error}; inside DataParallel, the axis of a strategy is syncalgos.WORKERS"
        ) from None


def _is_users(frame: traceback.FrameSummary) -> bool:
    """Whether a line belongs neither to jax nor to this library."""
    path = Path(frame.filename)
    jax_folder = Path(inspect.getfile(jax)).parent
    own_folder = Path(__file__).parents[1]
    return not (path.is_relative_to(jax_folder) or path.is_relative_to(own_folder))


def leading_shape(
    tree_name: str, tree: PyTree, axes: tuple[str, ...]
) -> tuple[int, ...]:
    """Returns the leading axes of all leaves; raises a ValueError if they disagree."""
    shapes = [(name, np.shape(x)) for name, x in checks.named_leaves(tree_name, tree)]
    if not shapes:
        raise ValueError(f"{tree_name} hold no arrays")
    first_name, first_shape = shapes[0]
    lead = first_shape[: len(axes)]
    axis_names = ", ".join(axes)
    for name, shape in shapes:
        if len(shape) < len(axes) and axes[0] == "steps":
            raise ValueError(
                f"{name} must have axes ({axis_names}, …), got shape {shape}; for a "
                "single step, pass x[None]"
            )
        if len(shape) < len(axes):
            raise ValueError(
                f"{name} must have axes ({axis_names}, …), got shape {shape}"
            )
        if shape[: len(axes)] != lead:
            raise ValueError(
                f"{name} has leading axes {shape[: len(axes)]}, but {first_name} has "
                f"{lead}: all leaves must agree on ({axis_names})"
            )
    return lead


def check_untraced(x: Any) -> None:
    """Raises a ValueError inside a jax.jit of the user."""
    if isinstance(x, Tracer):
        raise ValueError("DataParallel compiles by itself: call it outside jax.jit")


def check_arrays(tree_name: str, tree: PyTree) -> None:
    """Raises a ValueError unless all leaves are arrays; it names what was given."""
    for name, leaf in checks.named_leaves(tree_name, tree):
        check_untraced(leaf)
        check_ours(name, leaf)
        if hasattr(leaf, "shape"):
            continue
        type_name = type(leaf).__name__
        if isinstance(leaf, bool | int | float):
            raise ValueError(
                f"{name} is {type_name}: convert lists to arrays, np.asarray(…)"
            )
        raise ValueError(
            f"{name} is {type_name}, not an array: stack the batches of several steps, "
            "such as np.stack([next(batches) for _ in range(100)])"
        )


def python_numbers(hyperparams: PyTree) -> PyTree:
    """Returns hyperparameters as Python numbers; raises a ValueError for others."""

    def number(path: Any, x: Any) -> Any:
        check_untraced(x)
        name = "hyperparams" + jax.tree_util.keystr(path)
        if not isinstance(x, str | bool) and np.ndim(x):
            raise ValueError(
                f"{name} must be a number, got {checks.shown(x)}; train the settings "
                "in turn: numbers are data, so the program is compiled once"
            )
        # On the host: np.isreal of a jax array would compile programs.
        if isinstance(x, str | bool) or not np.isreal(np.asarray(x)):
            raise ValueError(f"{name} must be a number, got {checks.shown(x)}")
        value = np.asarray(x).item()
        if isinstance(value, int):
            check_fits(name, value, np.int64)
        return value

    return jax.tree_util.tree_map_with_path(number, hyperparams)


def check_like(hyperparams: PyTree, like: PyTree) -> None:
    """Raises a ValueError unless hyperparameters have the structure of others."""
    difference = checks.unlike("hyperparams", like, hyperparams)
    if difference:
        raise ValueError(
            f"hyperparams must have the structure of the trainer's: {difference}"
        )


def check_kind(name: str, value: Any, kind: type) -> None:
    """Raises a ValueError unless the value is of the kind."""
    if isinstance(value, kind):
        return
    if type(value) is tuple and value and isinstance(value[0], kind):
        raise ValueError(
            f"{name} must be a {kind.__name__}, got a tuple; unpack the result of run: "
            "state, metrics = trainer.run(…)"
        )
    raise ValueError(f"{name} must be a {kind.__name__}, got {checks.shown(value)}")


def check_plateau(opt_state: PyTree) -> None:
    """Raises a ValueError if each worker would lower its rate by its own loss."""
    # Such rates drift apart and never rise again. A worker's loss may rise because
    # other workers differ from it; that worker would soon stop training.
    if _optax_states.find_state_names(opt_state, _optax_states.FOLLOWS_LOSS):
        raise ValueError(
            "optimizer: reduce_on_plateau would follow each worker's own loss, so "
            "learning rates would differ between workers: use a schedule of the step, "
            "or a strategy that reduces gradients, such as sync_sgd"
        )


def full_loss(loss: Any) -> Loss:
    """Returns a loss in the engine's form; raises a ValueError for anything else.

    A plain loss takes two arguments, and a key if it asks for one. A loss that may be
    called with four is in the engine's form, unless its third is named as a key.
    """
    takes_four = not checks.misfit(loss, ["params", "buffers", "batch", "key"])
    if takes_four and not has_key_third(loss):
        return loss
    asks_for_key = find_key_argument(loss) is not None
    if asks_for_key or not checks.misfit(loss, ["params", "batch"]):
        return stateless(loss)
    if not callable(loss):
        raise ValueError(
            "loss must be a function of (params, batch), of (params, batch, key) or of "
            f"(params, buffers, batch, key), got {checks.shown(loss)}"
        )
    raise ValueError(
        "loss must be a function of (params, batch), of (params, batch, key) or of "
        "(params, buffers, batch, key), in this order; this one takes "
        f"{inspect.signature(loss)}: a batch of several arrays is one argument, such "
        "as a dict, and a keyword-only key is named key or rng"
    )


def check_batches(
    batches: PyTree,
    data: PyTree | None,
    layout: Layout,
    accumulate: int,
    advice: str = "for a single step, pass x[None]",
) -> None:
    """Raises the ValueErrors of `DataParallel.run`.

    The advice ends the message about a global batch that the workers do not divide.
    """
    check_arrays("batches", batches)
    steps, batch = leading_shape("batches", batches, ("steps", "global_batch"))
    if data is not None:
        check_row_numbers(batches, *leading_shape("data", data, ("examples",)))
    if steps == 0:
        raise ValueError("batches hold no steps")
    batch *= layout.feeders
    try:
        checks.global_batch(batch, layout.workers)
    except ValueError as error:
        raise ValueError(f"{error}; {advice}") from None
    check_parts(batch, layout, accumulate)


def count_extra_examples(batches: PyTree, layout: Layout) -> int:
    """Returns the examples of a global batch that workers do not divide evenly.

    Returns 0 if they divide evenly, or if extra ones cannot be handled separately.
    """
    # A leaf without a second axis is refused later: it counts as one of size 0.
    batch_sizes = {(*np.shape(x), 0, 0)[1] for x in jax.tree.leaves(batches)}
    if layout.feeders > 1 or len(batch_sizes) != 1:
        return 0
    return min(batch_sizes) % layout.readers


def check_parts(batch: int, layout: Layout, accumulate: int) -> None:
    """Raises a ValueError unless workers and their devices divide a global batch."""
    checks.global_batch(batch, layout.workers, accumulate)
    examples = batch // layout.workers // accumulate
    if examples % layout.batch_parts:
        part = "microbatch" if accumulate > 1 else "batch"
        axis_sizes = " × ".join(
            f"{name} = {layout.inner[name]}" for name in layout.batch_axes
        )
        raise ValueError(
            f"a worker's {part} of {examples} examples does not divide over "
            f"{axis_sizes}: use another global batch or other batch_axes"
        )


def check_row_numbers(rows: Any, examples: int) -> None:
    """Raises a ValueError unless rows are numbers of examples."""
    dtype = getattr(rows, "dtype", None)
    if dtype is None or not np.issubdtype(dtype, np.integer) or rows.ndim != 2:
        raise ValueError(
            "with data, batches must be integer row numbers (steps, global_batch)"
        )
    if rows.size:
        smallest = int(rows.min())
        largest = int(rows.max())
        if smallest < 0 or largest >= examples:
            raise ValueError(
                f"rows must be 0 to {examples - 1}, got {smallest} to {largest}"
            )


def check_step_count(num_steps: int) -> None:
    """Raises a ValueError if the devices cannot count this many local steps."""
    if not 0 <= num_steps < 2**31:
        raise ValueError(
            f"local steps must be from 0 to 2**31 - 1, got {num_steps}: call init with "
            "the center's params to start a new state"
        )


def check_own(leaf: Any, shape: tuple[int, int]) -> None:
    """Raises a ValueError unless a leaf of a state can be used by this layout."""
    # Before anything runs: jax 0.10.2 ends the interpreter with SIGSEGV when a donated
    # array enters a pmap over two CPU devices.
    if isinstance(leaf, jax.Array) and leaf.is_deleted():
        raise ValueError(
            "state was donated to an earlier run: use the state that this run returned"
        )
    leading_axes = np.shape(leaf)[:2]
    if leading_axes != shape:
        raise ValueError(
            f"state has leading axes {leading_axes}, but the workers of this trainer "
            f"need (devices, lanes) = {shape}"
        )


def check_workers(host_state: Any, workers: int) -> None:
    """Raises a ValueError unless replica and sync lead with this number of workers."""
    worker_arrays = host_state._replace(step=(), key=(), hyperparams=())
    for name, leaf in checks.named_leaves("held", worker_arrays):
        if np.shape(leaf)[:1] != (workers,):
            raise ValueError(
                f"{name} has shape {np.shape(leaf)}, but its first axis must be the "
                f"{workers} workers of this process"
            )
