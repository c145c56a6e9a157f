"""Everything that a strategy, reducer or combinator of your own is written with.

`help(syncalgos.writing.every)` describes one of its names, and so on:

- types: Strategy, Replica, MeanCenter, Reducer, Code, PyTree, Axis; WORKERS is the axis
- communication: collectives
- strategies to begin with: average, outer_step, chain, every, when, sync_every
- what a function that makes a strategy or a reducer is decorated with: factory
- anchors: start, pseudo_gradient, restart, shipped, nesterov_sgd
- reducers: leafwise, over_leaves, drawn
- numbers: widen, narrow, zeros, norm, root, own_key, common_key
- arguments: checks; check_strategy, for combinators

An algorithm's file in the library may import it, too: no algorithm is imported here.
"""

from syncalgos import checks as checks
from syncalgos import collectives as _collectives
from syncalgos._anchors import nesterov_sgd as nesterov_sgd
from syncalgos._anchors import pseudo_gradient as pseudo_gradient
from syncalgos._anchors import restart as restart
from syncalgos._anchors import shipped as shipped
from syncalgos._anchors import start as start
from syncalgos._combinators.chain import chain as chain
from syncalgos._combinators.primitives import average as average
from syncalgos._combinators.primitives import outer_step as outer_step
from syncalgos._combinators.schedule import every as every
from syncalgos._combinators.schedule import sync_every as sync_every
from syncalgos._combinators.schedule import when as when
from syncalgos._dtypes import narrow as narrow
from syncalgos._dtypes import norm as norm
from syncalgos._dtypes import root as root
from syncalgos._dtypes import widen as widen
from syncalgos._dtypes import zeros as zeros
from syncalgos._keys import common_key as common_key
from syncalgos._keys import own_key as own_key
from syncalgos.collectives import WORKERS as WORKERS
from syncalgos.collectives import Axis as Axis
from syncalgos.collectives import PyTree as PyTree
from syncalgos.reducers._hops import Code as Code
from syncalgos.reducers._hops import drawn as drawn
from syncalgos.reducers._reducer import Reducer as Reducer
from syncalgos.reducers._reducer import leafwise as leafwise
from syncalgos.reducers._reducer import over_leaves as over_leaves
from syncalgos.strategy import MeanCenter as MeanCenter
from syncalgos.strategy import Replica as Replica
from syncalgos.strategy import Strategy as Strategy
from syncalgos.strategy import check_strategy as check_strategy
from syncalgos.strategy import factory as factory

# An import would hide from pyright what the module holds.
collectives = _collectives
