"""Trained models as .safetensors files: only the center, without worker axes.

`Export` decides which model of a run its file holds.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError

from experiments import files
from experiments.command.errors import BadRequest, refusal
from experiments.training.process_group import on_host
from experiments.training.progress import Evaluation, find_best
from syncalgos import Replica

# The origin of a model, which its file names.
ORIGIN = ("algo", "arguments", "task", "task_arguments", "seed", "workers")
BLANK = "0" * 64  # the checksum of a file from which it is computed


class Export(NamedTuple):
    """The exported model of a run (--export), which only the first process writes.

    Attributes:
        path: the file; None if none is asked for.
        keep: which model to write, "last" or "best".
        planned_steps: the local steps after which the run is evaluated.
        origin: the content of the file's header, except for the step.
        is_first: whether this is the first process.
    """

    path: Path | None
    keep: str
    planned_steps: Sequence[int]
    origin: Mapping[str, Any]
    is_first: bool

    def add(self, center: Replica, evaluations: Sequence[Evaluation]) -> str:
        """Writes the model of the last evaluation if it is the best (--keep best).

        Returns:
            The reason why the model could not be written, or "".
        """
        if self.path is None or self.keep != "best":
            return ""
        last_evaluation = evaluations[-1]
        is_best = self._find_best(evaluations) is last_evaluation
        return self._write(center, last_evaluation.step) if is_best else ""

    def find_evaluation(
        self, evaluations: Sequence[Evaluation], *, has_diverged: bool
    ) -> Evaluation | None:
        """Returns the evaluation whose model the file is to hold; None if none is.

        Args:
            evaluations: all evaluations of the run.
            has_diverged: whether the run ended because it diverged.
        """
        if self.keep == "best":
            return self._find_best(evaluations)
        return None if has_diverged else evaluations[-1]

    def finish(self, center: Replica, evaluation: Evaluation | None) -> str:
        """Writes the model of the run's end, if it was not written before.

        Args:
            center: the model of the last evaluation.
            evaluation: the result of `find_evaluation`.

        Returns:
            The reason why the model is not in its file, or "".
        """
        if evaluation is None or self.path is None:
            return f"no model was written to {self.path}"
        step = evaluation.step
        if self.keep == "last":
            return self._write(center, step)
        # The file was written at that evaluation.
        if not self.is_first or facts(self.path) == self._header(step):
            return ""
        return (
            f"--keep best: {self.path} does not hold the best model, that of step "
            f"{step}"
        )

    def _find_best(self, evaluations: Sequence[Evaluation]) -> Evaluation | None:
        """Returns the best evaluation, but for the last one if a stop caused it."""
        # Of a run that is resumed with other --steps, earlier ones may not be planned.
        is_planned = evaluations[-1].step in self.planned_steps
        return find_best(evaluations if is_planned else evaluations[:-1])

    def _write(self, center: Replica, step: int) -> str:
        """Writes the center and its origin; returns why it could not, or ""."""
        center = jax.tree.map(on_host, center)  # all processes take part
        if self.path is None or not self.is_first:
            return ""
        try:
            save(self.path, center, self._header(step))
        except (OSError, SafetensorError) as error:  # the run's files come after it
            return f"--export {self.path}: {getattr(error, 'strerror', None) or error}"
        return ""

    def _header(self, step: int) -> dict[str, str]:
        """Returns the header of a file: its run, and the step."""
        content = {**self.origin, "steps": step}
        return {name: json.dumps(x) for name, x in content.items()}


def check_path(path: Path, overwrite: bool) -> None:
    """Raises a BadRequest unless a model can be written there; leaves no file."""
    if path.suffix != ".safetensors":
        raise BadRequest(f"--export {path}: the name must end in .safetensors")
    with files.refuse_os_errors("--export", path):
        if path.is_dir():
            raise BadRequest(f"--export {path} is a folder")
        if path.exists() and not overwrite:
            raise BadRequest(f"--export {path} exists: use another, or --overwrite")
        files.try_to_write(path.absolute().parent)


def save(path: Path, replica: Replica, facts: Mapping[str, str]) -> None:
    """Writes params and buffers of one plain model.

    Args:
        path: the file; its folder is made if needed.
        replica: the result of `DataParallel.center`.
        facts: the content of the file's header.

    Tensors are named by their path: params.conv1.w, params.0.b, buffers.norm.mean.

    Raises:
        OSError: the file cannot be written; an earlier file is unchanged.
        ValueError: a leaf cannot be written to such a file.
    """
    from safetensors.flax import save as encoded

    content = _with_sorted_facts(
        encoded(name_tensors(replica), {**facts, files.SEAL: BLANK})
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, _with_seal(content, BLANK, hashlib.sha256(content).hexdigest()))


def _with_sorted_facts(content: bytes) -> bytes:
    """Returns the bytes of a file with the facts in its header in order.

    safetensors writes them in another order in each process: the same model would have
    other bytes.
    """
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[8 + length :]


def facts(path: Path) -> dict[str, str]:
    """Returns the header of a file; {} if it cannot be read, or was changed."""

    try:
        return _header(path)
    except (OSError, SafetensorError, ValueError):
        return {}


def _header(path: str | Path) -> dict[str, str]:
    """Returns the header of a file, whose checksum it compares and leaves out.

    Raises:
        ValueError: the file was changed. Files of 0.3 have no checksum.
    """
    from safetensors import safe_open

    with safe_open(path, "np") as file:
        header = file.metadata() or {}
    seal = header.pop(files.SEAL, None)
    if seal:
        with files.open_regular(path) as file:
            size = file.read(8)
            head = size + file.read(int.from_bytes(size, "little"))
            head_digest = hashlib.sha256(_with_seal(head, seal, BLANK))
            # In pieces: a model may take most of the memory.
            digest = hashlib.file_digest(file, lambda: head_digest)
        if digest.hexdigest() != seal:
            raise ValueError(f"{path} was changed since it was written")
    return header


def _with_seal(content: bytes, old_seal: str, new_seal: str) -> bytes:
    """Returns the bytes of a file with another checksum in its header."""
    old_text = f'"{files.SEAL}":"{old_seal}"'
    new_text = f'"{files.SEAL}":"{new_seal}"'
    return content.replace(old_text.encode(), new_text.encode(), 1)


def name_tensors(replica: Replica) -> dict[str, Any]:
    """Returns the leaves of params and buffers by their names in a file.

    Raises:
        ValueError: two leaves have the same name, a leaf's name lies inside another's,
            or a leaf is not an array of numbers.
    """
    tensors: dict[str, Any] = {}
    folder_names: set[str] = set()
    for place, leaf in jax.tree_util.tree_leaves_with_path(_without_optimizer(replica)):
        name = _name(place)
        if name in tensors or name in folder_names:
            raise ValueError(f"--export: two arrays have the name {name}")
        # Dots separate the levels of a path: "a.b" would lie inside a leaf "a".
        folders = {*accumulate(name.split(".")[:-1], "{}.{}".format)}
        clash = folders & {*tensors}
        if clash:
            raise ValueError(f"--export: {name} would lie inside {min(clash)}")
        folder_names |= folders
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            raise ValueError(f"--export: {name} has type {leaf.dtype}, not numbers")
        tensors[name] = leaf
    return tensors


def load(path: str | Path, like: Replica | None = None) -> Replica:
    """Reads a model that `save` wrote.

    Args:
        path: the file.
        like: a replica whose params and buffers have the structure to fill. None makes
            nested dicts from the dotted names, and lists where all names are numbers.

    Returns:
        Replica(params, (), buffers).

    Raises:
        ValueError: the file was changed, has a type that NumPy lacks, lacks a tensor of
            `like`, or has it in another shape.
    """
    tensors = {name: jnp.asarray(x) for name, x in _tensors(path).items()}
    if like is not None:
        return _fill(path, tensors, like)
    tree: dict[str, Any] = {"params": {}, "buffers": {}}
    for name, tensor in tensors.items():
        *folders, leaf_name = name.split(".")
        branch = tree
        for folder in folders:
            branch = branch.setdefault(folder, {})
        branch[leaf_name] = tensor
    return Replica(_with_lists(tree["params"]), (), _with_lists(tree["buffers"]))


def _tensors(path: str | Path) -> dict[str, np.ndarray]:
    """Returns a file's tensors by name; raises the ValueErrors of `load`."""
    from safetensors import safe_open

    _header(path)
    tensors = {}
    with safe_open(path, "np") as file:
        for name in file.keys():  # noqa: SIM118
            try:
                tensors[name] = file.get_tensor(name)
            except AttributeError:  # such as eight bits
                dtype = file.get_slice(name).get_dtype()
                line = f"{path}: {name} has type {dtype}, which cannot be read"
                raise ValueError(line) from None
    return tensors


def _fill(path: str | Path, tensors: Mapping[str, Any], like: Replica) -> Replica:
    """Returns tensors in a replica's structure; raises the ValueErrors of `load`."""

    def leaf(place: tuple[Any, ...], expected: Any) -> Any:
        name = _name(place)
        if name not in tensors:
            raise ValueError(f"{path} has no {name} (it has: {', '.join(tensors)})")
        if tensors[name].shape != expected.shape:
            raise ValueError(
                f"{path}: {name} has shape {tensors[name].shape}, not {expected.shape}"
            )
        return tensors[name]

    return jax.tree_util.tree_map_with_path(leaf, _without_optimizer(like))


def read_start(path: Path, like: Replica) -> Replica:
    """Reads the model that a run starts from, converted to the run's dtypes.

    Raises:
        BadRequest: the file cannot be read, or holds another model, numbers that are
            not finite, or numbers that the run's dtypes cannot hold.
    """

    try:
        files.open_regular(path).close()
    except FileNotFoundError as error:
        raise BadRequest(f"--init-from {path}: there is no such file") from error
    except OSError as error:
        raise refusal(error, f"--init-from {path}: {error.strerror}") from error
    except files.Damaged as error:
        raise BadRequest(f"--init-from {error}") from error
    try:
        tensors = _tensors(path)
        model_tensors = name_tensors(like)
        extra_names = {*tensors} - {*model_tensors}
        if extra_names:
            raise ValueError(
                f"{path} has {min(extra_names)}, which this model does not have"
            )
        model = _fill(path, tensors, like)
        for name, x in model_tensors.items():
            _check_fits(f"{path}: {name}", tensors[name], x.dtype)
    except OSError as error:
        raise refusal(error, f"--init-from {path}: {error}") from None
    except SafetensorError as error:
        raise BadRequest(f"--init-from {path}: {error}") from None
    except ValueError as error:
        raise BadRequest(f"--init-from: {error}") from None
    return jax.tree.map(
        lambda x, expected: jnp.asarray(x, expected.dtype),
        model,
        _without_optimizer(like),
    )


def _check_fits(name: str, x: np.ndarray, dtype: Any) -> None:
    """Raises a ValueError unless a type can hold an array, but for rounding."""
    kinds = jnp.floating, jnp.complexfloating, jnp.integer, jnp.bool_
    if not any(jnp.issubdtype(x.dtype, k) and jnp.issubdtype(dtype, k) for k in kinds):
        raise ValueError(f"{name} has type {x.dtype}, which is no {dtype}")
    with np.errstate(over="ignore"):
        converted = x.astype(dtype)
    if not np.isfinite(x).all():
        raise ValueError(f"{name} holds a number that is not finite")
    is_kept = np.isfinite(converted) if x.dtype.kind not in "biu" else converted == x
    if not is_kept.all():
        raise ValueError(f"{name} holds a number that {dtype} cannot hold")


def _without_optimizer(replica: Replica) -> Replica:
    """Returns params and buffers alone."""
    return Replica(replica.params, (), replica.buffers)


def _name(place: tuple[Any, ...]) -> str:
    """Returns the name of a leaf: its path in a replica, with dots."""
    return jax.tree_util.keystr(place, simple=True, separator=".")


def _with_lists(tree: Any) -> Any:
    if not isinstance(tree, dict):
        return tree
    if not tree:
        return ()
    branches = {name: _with_lists(x) for name, x in tree.items()}
    numbers = [str(i) for i in range(len(branches))]
    if set(branches) == set(numbers):
        return [branches[i] for i in numbers]
    return branches
