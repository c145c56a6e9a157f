"""The pieces of a leaf, each compressed as a leaf of its own: layers and shards."""

from syncalgos.reducers._stacking.pieces import Layered as Layered
from syncalgos.reducers._stacking.pieces import Pieces as Pieces
from syncalgos.reducers._stacking.pieces import check_layered as check_layered
from syncalgos.reducers._stacking.pieces import counts as counts
from syncalgos.reducers._stacking.pieces import means as means
from syncalgos.reducers._stacking.pieces import pieces as pieces
from syncalgos.reducers._stacking.pieces import pieces_like as pieces_like
