"""A task's data for a run: loaded, checked, split, and read in batches."""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from experiments.command.errors import (
    STOPS,
    BadRequest,
    MayPass,
    explain,
    explaining_errors,
    may_pass,
)
from experiments.command.stopping import say
from syncalgos import checks

Arrays = dict[str, np.ndarray]
WEIGHT = "weight"  # the name of an example's weight in an evaluation
THREADS = 2
AHEAD = 2  # reading threads, and dispatches read in advance
MOST_ON_DEVICE = 2**30  # bytes of training data, of which each device has a copy


class Source(Protocol):
    """Examples that are made or read one by one, like grain's data sources."""

    def __len__(self) -> int:
        """The number of examples."""
        ...

    def __getitem__(self, number: int, /) -> Mapping[str, np.ndarray]:
        """One example, without a leading axis."""
        ...


class Data(NamedTuple):
    """A task's examples.

    Attributes:
        train: training examples; leaves (examples, ...), or a source of them.
        test: held-out examples; leaves (examples, ...), with the same names.
        groups: by name, the number of each training example's group, (examples,). A
            group is a class, "label", or an origin, such as "speaker". Each worker can
            get its own groups (`experiments.data.sampling`).
        overlapping: the number of following training examples that share content with
            an example, as windows of a text do; 0 if examples are independent.
        covering: a stride: taking every covering-th of overlapping examples shows all
            content once, so that no held-out content is counted twice.
        part_of: if arrays were split, the whole arrays and the numbers of the `train`
            examples in them, so that runs on a part and on the whole share programs.
        num_test: if a split has replaced the test data, the number of its examples:
            evaluations of both parts share programs if they have as many rows.
        sha256: the checksum of a user's files, by which a resumed run detects changes;
            "" if that is impossible or not needed.
        preparation: by key, how examples were made of a user's files, as JSON values:
            an exported model has them in its header.
    """

    train: Arrays | Source
    test: Arrays
    groups: Mapping[str, np.ndarray] = {}
    overlapping: int = 0
    covering: int = 1
    part_of: tuple[Arrays, np.ndarray] | None = None
    num_test: int = 0
    sha256: str = ""
    preparation: Mapping[str, Any] = {}

    @property
    def examples(self) -> int:
        """The number of training examples."""
        if isinstance(self.train, dict):
            return len(next(iter(self.train.values())))
        return len(self.train)


def load_data(read: Callable[[], Data], name: str, share: float | None) -> Data:
    """Reads the data of a task.

    Args:
        read: reads the data.
        name: the name of the task, for errors.
        share: the share of training data that replaces the test data; None means none.

    Raises:
        ValueError: the data cannot be used; one line says why.
    """
    with explaining_errors("task", name):
        data = read()
        check_data(data)
    if share is not None:
        data = split(data, share)
    num_repeated = count_repeated_rows(data)
    if num_repeated:
        say(
            f"task {name}: {num_repeated} of {len(next(iter(data.test.values())))} "
            "held-out rows are also among the rows to train on, so that the accuracy "
            "does not show how the model does on new rows: if these are copies, remove "
            "them from the file"
        )
    return data


def count_repeated_rows(data: Data) -> int:
    """Counts the held-out examples of a user's table that are also training examples.

    Returns:
        Their number; 0 for other data, whose examples are not compared.
    """
    if not data.sha256 or not isinstance(data.train, dict) or data.overlapping:
        return 0
    digests = [_row_digests(part) for part in (data.train, data.test)]
    train_digests = set(digests[0])
    return sum(digest in train_digests for digest in digests[1])


def _row_digests(part: Arrays) -> Iterator[bytes]:
    """Yields a digest of each example."""
    for row in range(len(next(iter(part.values())))):
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(part):
            digest.update(np.ascontiguousarray(part[name][row]).tobytes())
        yield digest.digest()


def must(holds: bool, rule: str, value: Any) -> None:
    """Raises a ValueError with a rule and the value found, unless the rule holds."""
    if not holds:
        raise ValueError(f"{rule}, got {checks.shown(value)}")


def check_data(data: Any) -> None:
    """Raises a ValueError unless this is a Data with consistent parts."""
    must(isinstance(data, Data), "load must return a Data", data)
    _check_arrays("test", data.test)
    train = data.train
    if isinstance(train, dict):
        _check_arrays("train", train)
        names = [*train]
    else:
        must(
            hasattr(train, "__len__") and hasattr(train, "__getitem__"),
            "train must be a dict of arrays, or a source with a length whose items are "
            "examples",
            train,
        )
        example = train[0]
        is_example = isinstance(example, Mapping)
        must(is_example, "train[0] must be an example, a dict of arrays", example)
        names = [*example]
    if set(names) != set(data.test):
        raise ValueError(f"train has arrays {names}, but test has {[*data.test]}")
    if WEIGHT in data.test:
        raise ValueError(f"{WEIGHT!r} is a name that evaluation adds: use another name")
    for name, group in data.groups.items():
        numbers = np.asarray(group)
        if numbers.dtype.kind not in "iu" or numbers.shape != (data.examples,):
            raise ValueError(
                f"groups must hold whole numbers ({data.examples},), one for each "
                f"training example, got {name!r} of {numbers.dtype} {numbers.shape}"
            )
    checks.whole("overlapping", data.overlapping, least=0)
    checks.whole("covering", data.covering, least=1)


def _check_arrays(name: str, part: Any) -> None:
    """Raises a ValueError unless this is a dict of arrays of one length."""
    must(isinstance(part, dict), f"{name} must be a dict of arrays", part)
    for leaf, x in part.items():
        must(
            isinstance(x, np.ndarray | jax.Array) and x.ndim > 0,
            f"{name}[{leaf!r}] must be an array, with examples as first axis",
            x,
        )
    lengths = {leaf: len(x) for leaf, x in part.items()}
    if len(set(lengths.values())) != 1 or not all(lengths.values()):
        raise ValueError(f"{name} must have arrays of one length, above 0: {lengths}")


def is_read_on_host(data: Data) -> bool:
    """Whether batches are read on the host: the devices do not hold the data."""
    if not isinstance(data.train, dict):
        return True
    return sum(x.nbytes for x in data.train.values()) > MOST_ON_DEVICE


def split(data: Data, share: float) -> Data:
    """Holds out a share of the training data in place of the test data.

    The part is drawn at random, but is always the same. Labels keep their proportions,
    to within one example. If neighbouring examples overlap, the end of the training
    data is held out instead. Examples before it that share its content are left out of
    both parts, and it is thinned so that it has each content once (see
    `Data.covering`).

    Args:
        data: the data; of its test data, only the size is read.
        share: the share of the training examples to hold out, above 0 and below 1.

    Returns:
        A Data with the rest as training data and the part as test data. The held-out
        part of a source is read at once, the rest on demand.

    Raises:
        ValueError: the share is out of range, or leaves a part empty.

    Statistics that a task computes when it loads its training data, such as means of
    features or a vocabulary, include the held-out part.
    """
    share = checks.real("the share of validation data", share, above=0, below=1)
    examples = data.examples
    count = round(share * examples)
    num_left = examples - count - data.overlapping
    if count < 1 or num_left < 1:
        raise ValueError(
            f"validation data: a share of {share:g} of {examples} training examples "
            f"leaves {max(num_left, 0)} to train on and {count} to validate on"
        )
    if data.overlapping:
        training_rows = np.arange(num_left)
        validation_rows = np.arange(examples - count, examples)[:: data.covering]
    else:
        validation_rows = _drawn(data.groups.get("label"), examples, count)
        training_rows = np.setdiff1d(np.arange(examples), validation_rows)
    train = data.train
    return data._replace(
        train=gather(train, training_rows)
        if isinstance(train, dict)
        else Part(train, training_rows),
        test=gather(train, validation_rows),
        groups={name: group[training_rows] for name, group in data.groups.items()},
        part_of=(train, training_rows.astype(np.int32))
        if isinstance(train, dict)
        else None,
        num_test=len(next(iter(data.test.values()))),
    )


class Part:
    """A part of a source, whose examples are read one by one."""

    def __init__(self, source: Source, numbers: np.ndarray):
        self.source = source
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, number: int) -> Mapping[str, np.ndarray]:
        """Reads one example, by its number in the part."""
        return read_example(self.source, int(self.numbers[number]))


def _drawn(labels: np.ndarray | None, examples: int, count: int) -> np.ndarray:
    """Draws the numbers of examples, (count,), sorted, with labels in proportion."""
    # The same draw for all runs, so that they differ only in training.
    order = np.random.default_rng(0).permutation(examples)
    if labels is not None:
        order = order[np.argsort(labels[order], kind="stable")]
    # Evenly spaced places in shuffled examples sorted by label: these take each label's
    # share, rounded up or down, and `count` examples in all.
    return np.sort(order[(2 * np.arange(count) + 1) * examples // (2 * count)])


def read_ahead(
    train: Arrays | Source,
    dispatches: Sequence[tuple[int, int]],
    rows: Callable[[int, int], np.ndarray],
) -> Iterator[Arrays]:
    """Yields the batches of one dispatch after another, read by grain's threads.

    Args:
        train: the examples.
        dispatches: (first step, steps) of each dispatch.
        rows: maps (first step, steps) to the numbers of the examples, (steps, batch).

    Returns:
        Leaves (steps, batch, ...), in the order of the dispatches.
    """
    # Importing grain takes a second, which data on the devices does not need.
    import grain

    # One item per dispatch, in the sampler's order: runs with data on the host give the
    # same bits as runs with data on the devices.
    source = grain.MapDataset.source(dispatches)
    batches = source.map(lambda dispatch: gather(train, rows(*dispatch)))
    options = grain.ReadOptions(num_threads=THREADS, prefetch_buffer_size=AHEAD)
    return iter(batches.to_iter_dataset(options))


def gather(train: Arrays | Source, rows: np.ndarray) -> Arrays:
    """Stacks the examples with these numbers: leaves (*rows.shape, ...).

    Raises:
        BadRequest: an example cannot be read, or differs in shape from others.
    """
    if isinstance(train, dict):
        return {name: x[rows] for name, x in train.items()}
    numbers = rows.reshape(-1).tolist()
    examples = [read_example(train, number) for number in numbers]
    forms = [_shapes(example) for example in examples]
    if any(form != forms[0] for form in forms):
        usual = max(forms, key=forms.count)
        odd = next(i for i, form in enumerate(forms) if form != usual)
        raise BadRequest(
            f"training example {numbers[odd]} has shapes {forms[odd]}, but example "
            f"{numbers[forms.index(usual)]} has {usual}"
        )
    arrays = {}
    for name in forms[0]:
        stacked_array = np.stack([example[name] for example in examples])
        arrays[name] = stacked_array.reshape(*rows.shape, *stacked_array.shape[1:])
    return arrays


def _shapes(example: Mapping[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an example's arrays."""
    return {name: np.shape(x) for name, x in example.items()}


def read_example(source: Source, number: int) -> Mapping[str, np.ndarray]:
    """Reads a copy of one example of a source, which may use its memory again.

    Raises:
        BadRequest: it cannot be read, or is no dict of arrays.
        MayPass: it cannot be read now, but perhaps later.
    """
    try:
        example = source[number]
        is_dict = isinstance(example, Mapping)
        arrays = {k: np.array(x) for k, x in example.items()} if is_dict else {}
        if not arrays or any(x.dtype.kind in "OSU" for x in arrays.values()):
            raise BadRequest(
                f"training example {number} must be a dict of arrays, got "
                f"{checks.shown(example)}"
            )
        return arrays
    except (BadRequest, *STOPS):
        raise
    except BaseException as error:  # a user's source may raise anything
        refused = explain(f"training example {number}", error)
        if may_pass(error):
            raise MayPass(str(refused)) from error
        raise refused from error
