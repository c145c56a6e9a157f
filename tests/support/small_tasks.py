"""Every task with a small model, and random examples of its data's form."""

import inspect
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from experiments.command.factories import TASK, find_function
from experiments.data import formats, tokens
from support.commands import ROOT

CONTEXT = 8
FRAMES = 6
BESIDE = ROOT.parent / "shared" / "data"  # the real data sets, beside the checkout


class ExampleLeaf(NamedTuple):
    """A leaf of examples: its entries, and the shape of one example's."""

    dtype: str
    shape: tuple[int, ...]
    below: int  # whole numbers are drawn below it; 0 draws normal ones


class Small(NamedTuple):
    """A task's flags that make it small, its data's form and its files."""

    flags: dict[str, Any]
    form: dict[str, ExampleLeaf]
    files: tuple[str, ...] = ()


PICTURES_28 = {
    "x": ExampleLeaf("uint8", (28, 28), 256),
    "y": ExampleLeaf("int32", (), 10),
}
PICTURES_32 = {
    "x": ExampleLeaf("uint8", (32, 32, 3), 256),
    "y": ExampleLeaf("int32", (), 10),
}
NUMBERED = {"number": ExampleLeaf("int32", (), 4096)}
FILES = {
    "mnist": tuple(file.path for file in formats.IDX_FILES["mnist"]),
    "fashion-mnist": tuple(file.path for file in formats.IDX_FILES["fashion-mnist"]),
    "plays": (tokens.SHAKESPEARE.path,),
    "speech": (formats.TAR_GZ.path,),
    "cifar": (formats.CIFAR.path,),
}
SMALL = {
    "digits": Small(
        {}, {"x": ExampleLeaf("float32", (64,), 0), "y": ExampleLeaf("int32", (), 10)}
    ),
    "mnist": Small({}, PICTURES_28, FILES["mnist"]),
    "fashion_mnist": Small({}, PICTURES_28, FILES["fashion-mnist"]),
    "spoken_digits": Small(
        {"hidden": 5, "layers": 2, "frames": FRAMES},
        {
            "x": ExampleLeaf("float32", (FRAMES, formats.BANDS), 0),
            "length": ExampleLeaf("int32", (), FRAMES),
            "y": ExampleLeaf("int32", (), 10),
        },
        FILES["speech"],
    ),
    "shakespeare": Small(
        {"context": CONTEXT, "width": 8, "layers": 2, "heads": 2},
        {"window": ExampleLeaf("uint8", (CONTEXT + 1,), 65)},
        FILES["plays"],
    ),
    "gpt2_synthetic": Small(
        {"model": "gpt2-tiny", "dtype": "float32"},
        {"window": ExampleLeaf("uint16", (65,), 512)},
    ),
    "text": Small(
        {
            "text": str(ROOT / "LICENSE"),
            "data_dir": ROOT / ".pytest_cache" / "d",  # where it keeps its tokens
            "vocabulary": 300,
            **{"context": CONTEXT, "width": 8, "layers": 2, "heads": 2},
        },
        {
            "window": ExampleLeaf("uint16", (CONTEXT + 1,), 300),
            "bytes": ExampleLeaf("int32", (), 9 * CONTEXT),
        },
    ),
    "embeddings": Small(
        {"order": 3, "width": 4, "negatives": 0},
        {"ngram": ExampleLeaf("int32", (3,), 12_631)},
        FILES["plays"],
    ),
    "cifar10": Small({}, PICTURES_32, FILES["cifar"]),
    "imagenet_synthetic": Small(
        {"model": "resnet20", "image_size": 32},
        {
            "x": ExampleLeaf("uint8", (32, 32, 3), 256),
            "y": ExampleLeaf("int32", (), 1000),
        },
    ),
    "mnist1d": Small(
        {}, {"x": ExampleLeaf("float32", (40,), 0), "y": ExampleLeaf("int32", (), 10)}
    ),
    # Without noise, which each worker draws from its own key.
    "quadratic": Small({"dimensions": 6, "noise": 0.0}, NUMBERED),
    "rosenbrock": Small({"noise": 0.0}, NUMBERED),
    "table": Small(
        {"file": str(Path(__file__).with_name("flowers.csv"))},
        {"x": ExampleLeaf("float32", (2,), 0), "y": ExampleLeaf("int32", (), 2)},
    ),
}


def parameters(name):
    """The names of a task's parameters."""
    return inspect.signature(find_function(TASK, name)).parameters


def make(name, **flags):
    """The small task; flags are the factory's own, and win."""
    return find_function(TASK, name)(**{**SMALL[name].flags, **flags})


def find_data_folder(*names):
    """The data folder, $SYNCALGOS_DATA or that beside the checkout.

    Skips the test if it lacks one of the names: a test downloads nothing.
    """
    folder = Path(os.environ.get("SYNCALGOS_DATA") or BESIDE)
    lacking = [name for name in names if not (folder / name).is_file()]
    if lacking:
        pytest.skip(f"{folder} lacks {', '.join(lacking)}: name it in SYNCALGOS_DATA")
    return folder


def task_folder(name):
    """The data folder of a task; skips the test where the files are absent."""
    return find_data_folder(*SMALL[name].files)


def on_real_data(name, **flags):
    """The small task with its own data, which `load` reads."""
    if name == "text":
        pytest.importorskip("tokenizers")
    if "data_dir" in parameters(name) and "data_dir" not in SMALL[name].flags:
        flags["data_dir"] = task_folder(name)
    return make(name, **flags)


def examples(name, *counts, seed=0):
    """Random examples, leaves (*counts, …)."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for leaf, (dtype, shape, below) in SMALL[name].form.items():
        full_shape = (*counts, *shape)
        least = int(leaf == "length")  # of at least a frame
        if below:
            x = rng.integers(least, below, full_shape)
        else:
            x = rng.normal(size=full_shape)
        arrays[leaf] = x.astype(dtype)
    return arrays
