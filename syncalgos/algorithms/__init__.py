"""The registry: every algorithm by its name, one file each."""

from collections.abc import Callable

from syncalgos.algorithms.bmuf import bmuf
from syncalgos.algorithms.diloco import diloco
from syncalgos.algorithms.model_averaging import model_averaging
from syncalgos.algorithms.sync_sgd import sync_sgd
from syncalgos.base import Strategy

ALGORITHMS: dict[str, Callable[..., Strategy]] = {
    "sync_sgd": sync_sgd,
    "model_averaging": model_averaging,
    "bmuf": bmuf,
    "diloco": diloco,
}
