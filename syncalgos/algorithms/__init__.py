"""The registry: every algorithm by its name, one file each."""

from collections.abc import Callable as _Callable

from syncalgos.algorithms.bmuf import bmuf as bmuf
from syncalgos.algorithms.diloco import diloco as diloco
from syncalgos.algorithms.model_averaging import model_averaging as model_averaging
from syncalgos.algorithms.sync_sgd import sync_sgd as sync_sgd
from syncalgos.base import Strategy as _Strategy

ALGORITHMS: dict[str, _Callable[..., _Strategy]] = {
    "sync_sgd": sync_sgd,
    "model_averaging": model_averaging,
    "bmuf": bmuf,
    "diloco": diloco,
}
