"""The registry: every algorithm by its name, one file each."""

from collections.abc import Callable as _Callable

from syncalgos.algorithms.async_diloco import async_diloco as async_diloco
from syncalgos.algorithms.bmuf import bmuf as bmuf
from syncalgos.algorithms.demo import demo as demo
from syncalgos.algorithms.des_loc import des_loc as des_loc
from syncalgos.algorithms.diloco import diloco as diloco
from syncalgos.algorithms.dynamic_averaging import (
    dynamic_averaging as dynamic_averaging,
)
from syncalgos.algorithms.eager_diloco import eager_diloco as eager_diloco
from syncalgos.algorithms.easgd import easgd as easgd
from syncalgos.algorithms.fedavg import fedavg as fedavg
from syncalgos.algorithms.gossip import gossip as gossip
from syncalgos.algorithms.hierarchical import hierarchical as hierarchical
from syncalgos.algorithms.model_averaging import model_averaging as model_averaging
from syncalgos.algorithms.noloco import noloco as noloco
from syncalgos.algorithms.post_local_sgd import post_local_sgd as post_local_sgd
from syncalgos.algorithms.powersgd import powersgd as powersgd
from syncalgos.algorithms.push_sum import push_sum as push_sum
from syncalgos.algorithms.qsr import qsr as qsr
from syncalgos.algorithms.quantized_sgd import quantized_sgd as quantized_sgd
from syncalgos.algorithms.scaffold import scaffold as scaffold
from syncalgos.algorithms.sign_sgd import sign_sgd as sign_sgd
from syncalgos.algorithms.slowmo import slowmo as slowmo
from syncalgos.algorithms.sparseloco import sparseloco as sparseloco
from syncalgos.algorithms.sparta import sparta as sparta
from syncalgos.algorithms.streaming_diloco import streaming_diloco as streaming_diloco
from syncalgos.algorithms.sync_sgd import sync_sgd as sync_sgd
from syncalgos.algorithms.topk_sgd import topk_sgd as topk_sgd
from syncalgos.base import Strategy as _Strategy

ALGORITHMS: dict[str, _Callable[..., _Strategy]] = {
    "sync_sgd": sync_sgd,
    "model_averaging": model_averaging,
    "post_local_sgd": post_local_sgd,
    "hierarchical": hierarchical,
    "fedavg": fedavg,
    "qsr": qsr,
    "des_loc": des_loc,
    "dynamic_averaging": dynamic_averaging,
    "bmuf": bmuf,
    "slowmo": slowmo,
    "diloco": diloco,
    "streaming_diloco": streaming_diloco,
    "eager_diloco": eager_diloco,
    "async_diloco": async_diloco,
    "noloco": noloco,
    "easgd": easgd,
    "gossip": gossip,
    "push_sum": push_sum,
    "scaffold": scaffold,
    "sparta": sparta,
    "demo": demo,
    "sparseloco": sparseloco,
    "powersgd": powersgd,
    "topk_sgd": topk_sgd,
    "sign_sgd": sign_sgd,
    "quantized_sgd": quantized_sgd,
}
