"""Collectives over the workers: the only folder that calls the collectives of jax.lax.

Each takes a tree and the axis over which the workers lie, and works alike on virtual
workers, devices and processes. `communication` counts their bytes from the traced
program. A strategy that communicates only through them runs on every backend.
"""

from syncalgos.collectives.axes import WORKERS as WORKERS
from syncalgos.collectives.axes import Axis as Axis
from syncalgos.collectives.axes import index as index
from syncalgos.collectives.axes import platform as platform
from syncalgos.collectives.axes import size as size
from syncalgos.collectives.means import SUMMED as SUMMED
from syncalgos.collectives.means import agreed as agreed
from syncalgos.collectives.means import group_mean as group_mean
from syncalgos.collectives.means import mean as mean
from syncalgos.collectives.moves import all_to_all as all_to_all
from syncalgos.collectives.moves import exchange as exchange
from syncalgos.collectives.moves import gather as gather
from syncalgos.collectives.moves import shift as shift
from syncalgos.collectives.shares import counting as counting
from syncalgos.collectives.shares import no_mean as no_mean
from syncalgos.collectives.shares import takes_part as takes_part
from syncalgos.collectives.shares import unweighted as unweighted
from syncalgos.collectives.shares import weighted as weighted
from syncalgos.dtypes import PyTree as PyTree
