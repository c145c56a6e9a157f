"""The registry: an import of each algorithm, and the list in the docs' order."""

from collections.abc import Callable as _Callable

from syncalgos._names import Registry as _Registry
from syncalgos.algorithms.async_diloco import async_diloco as async_diloco
from syncalgos.algorithms.bmuf import bmuf as bmuf
from syncalgos.algorithms.choco_sgd import choco_sgd as choco_sgd
from syncalgos.algorithms.co2 import co2 as co2
from syncalgos.algorithms.d2 import d2 as d2
from syncalgos.algorithms.decoupled_diloco import decoupled_diloco as decoupled_diloco
from syncalgos.algorithms.demo import demo as demo
from syncalgos.algorithms.des_loc import des_loc as des_loc
from syncalgos.algorithms.dgc import dgc as dgc
from syncalgos.algorithms.diloco import diloco as diloco
from syncalgos.algorithms.diloco_x import diloco_x as diloco_x
from syncalgos.algorithms.dion import dion as dion
from syncalgos.algorithms.distributed_lion import distributed_lion as distributed_lion
from syncalgos.algorithms.dynamic_averaging import (
    dynamic_averaging as dynamic_averaging,
)
from syncalgos.algorithms.eager_diloco import eager_diloco as eager_diloco
from syncalgos.algorithms.easgd import easgd as easgd
from syncalgos.algorithms.edit import edit as edit
from syncalgos.algorithms.ef21 import ef21 as ef21
from syncalgos.algorithms.ema_nesterov import ema_nesterov as ema_nesterov
from syncalgos.algorithms.fedavg import fedavg as fedavg
from syncalgos.algorithms.feddyn import feddyn as feddyn
from syncalgos.algorithms.fedopt import fedopt as fedopt
from syncalgos.algorithms.fedprox import fedprox as fedprox
from syncalgos.algorithms.gasloc import gasloc as gasloc
from syncalgos.algorithms.gossip import gossip as gossip
from syncalgos.algorithms.gossip_pga import gossip_pga as gossip_pga
from syncalgos.algorithms.gpa import gpa as gpa
from syncalgos.algorithms.gradient_tracking import (
    gradient_tracking as gradient_tracking,
)
from syncalgos.algorithms.halos import halos as halos
from syncalgos.algorithms.heloco import heloco as heloco
from syncalgos.algorithms.hierarchical import hierarchical as hierarchical
from syncalgos.algorithms.loco import loco as loco
from syncalgos.algorithms.lookahead import lookahead as lookahead
from syncalgos.algorithms.model_averaging import model_averaging as model_averaging
from syncalgos.algorithms.muloco import muloco as muloco
from syncalgos.algorithms.noloco import noloco as noloco
from syncalgos.algorithms.one_bit_adam import one_bit_adam as one_bit_adam
from syncalgos.algorithms.overlap_local_sgd import (
    overlap_local_sgd as overlap_local_sgd,
)
from syncalgos.algorithms.palsgd import palsgd as palsgd
from syncalgos.algorithms.post_local_sgd import post_local_sgd as post_local_sgd
from syncalgos.algorithms.powersgd import powersgd as powersgd
from syncalgos.algorithms.pulseloco import pulseloco as pulseloco
from syncalgos.algorithms.push_sum import push_sum as push_sum
from syncalgos.algorithms.qg_dsgdm import qg_dsgdm as qg_dsgdm
from syncalgos.algorithms.qsr import qsr as qsr
from syncalgos.algorithms.quantized_sgd import quantized_sgd as quantized_sgd
from syncalgos.algorithms.scaffnew import scaffnew as scaffnew
from syncalgos.algorithms.scaffold import scaffold as scaffold
from syncalgos.algorithms.sign_sgd import sign_sgd as sign_sgd
from syncalgos.algorithms.signum import signum as signum
from syncalgos.algorithms.slowmo import slowmo as slowmo
from syncalgos.algorithms.sparseloco import sparseloco as sparseloco
from syncalgos.algorithms.sparta import sparta as sparta
from syncalgos.algorithms.streaming_diloco import streaming_diloco as streaming_diloco
from syncalgos.algorithms.sync_sgd import sync_sgd as sync_sgd
from syncalgos.algorithms.topk_sgd import topk_sgd as topk_sgd
from syncalgos.algorithms.zero_one_adam import zero_one_adam as zero_one_adam
from syncalgos.strategy import Strategy as _Strategy

ALGORITHMS: dict[str, _Callable[..., _Strategy]] = _Registry(
    [
        sync_sgd,
        gpa,
        ema_nesterov,
        model_averaging,
        post_local_sgd,
        hierarchical,
        fedavg,
        fedprox,
        qsr,
        des_loc,
        dynamic_averaging,
        bmuf,
        slowmo,
        lookahead,
        fedopt,
        overlap_local_sgd,
        co2,
        diloco,
        muloco,
        edit,
        streaming_diloco,
        eager_diloco,
        diloco_x,
        palsgd,
        async_diloco,
        decoupled_diloco,
        heloco,
        halos,
        noloco,
        gasloc,
        easgd,
        gossip,
        gossip_pga,
        d2,
        gradient_tracking,
        choco_sgd,
        push_sum,
        qg_dsgdm,
        scaffold,
        scaffnew,
        feddyn,
        sparta,
        demo,
        sparseloco,
        pulseloco,
        powersgd,
        dion,
        topk_sgd,
        dgc,
        ef21,
        sign_sgd,
        distributed_lion,
        signum,
        one_bit_adam,
        zero_one_adam,
        quantized_sgd,
        loco,
    ]
)
