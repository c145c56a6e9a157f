"""The harness, which trains any strategy on any task.

Runs with the same seed see the same batches. In Python, `train` executes a run and
`compare` makes a study; see `experiments.api`.
"""

import random
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if find_spec("filelock") is None:  # of the extra `experiments`
    raise ModuleNotFoundError("the harness needs pip install -e '.[experiments]'")

# rich draws a number when it is imported, but the global generator is the user's.
_state = random.getstate()
import_module("rich.style")
random.setstate(_state)

if TYPE_CHECKING:
    from experiments.api import Study as Study
    from experiments.api import Trained as Trained
    from experiments.api import compare as compare
    from experiments.api import train as train
    from experiments.training.config import RunConfig as RunConfig

_PLACES = {"Study": "api", "Trained": "api", "compare": "api", "train": "api"}
_PLACES |= {"RunConfig": "training.config"}


def __getattr__(name: str) -> Any:
    """Imports a name at its first use, so that refusing a flag does not import jax."""
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{place}"), name)
