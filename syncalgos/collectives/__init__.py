"""Collectives over the workers: the only folder that calls the collectives of jax.lax.

Each takes a tree and the axis over which the workers lie, and works alike on virtual
workers, devices and processes. `communication` counts their bytes from the traced
program. A strategy that communicates only through them runs on every backend.
"""

from syncalgos._dtypes import PyTree as PyTree
from syncalgos.collectives._axes import WORKERS as WORKERS
from syncalgos.collectives._axes import Axis as Axis
from syncalgos.collectives._axes import index as index
from syncalgos.collectives._axes import platform as platform
from syncalgos.collectives._axes import size as size
from syncalgos.collectives._means import SUMMED as SUMMED
from syncalgos.collectives._means import agreed as agreed
from syncalgos.collectives._means import group_mean as group_mean
from syncalgos.collectives._means import mean as mean
from syncalgos.collectives._moves import all_to_all as all_to_all
from syncalgos.collectives._moves import exchange as exchange
from syncalgos.collectives._moves import gather as gather
from syncalgos.collectives._moves import shift as shift
from syncalgos.collectives._shares import counting as counting
from syncalgos.collectives._shares import no_mean as no_mean
from syncalgos.collectives._shares import takes_part as takes_part
from syncalgos.collectives._shares import unweighted as unweighted
from syncalgos.collectives._shares import weighted as weighted
