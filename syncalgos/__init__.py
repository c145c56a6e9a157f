"""Pluggable synchronization algorithms for data-parallel training in JAX."""

from syncalgos import collectives as collectives
from syncalgos import reducers as reducers
from syncalgos.algorithms import *  # noqa: F403  every algorithm, and ALGORITHMS
from syncalgos.averages import ema as ema
from syncalgos.base import MeanCenter as MeanCenter
from syncalgos.base import Replica as Replica
from syncalgos.base import Strategy as Strategy
from syncalgos.base import chain as chain
from syncalgos.base import every as every
from syncalgos.base import when as when
from syncalgos.collectives import WORKERS as WORKERS
from syncalgos.decisions import decided as decided
from syncalgos.delays import delayed as delayed
from syncalgos.ledger import Communication as Communication
from syncalgos.ledger import communication as communication
from syncalgos.losses import per_example as per_example
from syncalgos.losses import stateless as stateless
from syncalgos.masks import masked as masked
from syncalgos.parallel import DataParallel as DataParallel
from syncalgos.parallel import TrainState as TrainState
from syncalgos.participation import paced as paced
from syncalgos.participation import participating as participating
from syncalgos.participation import sampled as sampled
from syncalgos.phases import after as after
from syncalgos.phases import until as until
from syncalgos.reducers import mean as mean
from syncalgos.syncs import at_syncs as at_syncs
from syncalgos.syncs import average as average
from syncalgos.syncs import outer_step as outer_step
from syncalgos.syncs import reduce_with as reduce_with
from syncalgos.syncs import reset as reset
from syncalgos.tables import lookup as lookup

__version__ = "0.1.0"
