"""Reducers combine values over the workers: optax GradientTransformations.

A reducer takes one worker's tree and returns the combined tree, identical on all
workers. It serves gradients (`reduce_with`), params (`average`) and outer gradients
(`outer_step`) alike. Made without `axis`, it takes the axis of the strategy around it.
"""

from syncalgos.reducers.chunks import chunked_top_k as chunked_top_k
from syncalgos.reducers.dense import bf16 as bf16
from syncalgos.reducers.dense import cast as cast
from syncalgos.reducers.dense import fp16 as fp16
from syncalgos.reducers.dense import low_bit as low_bit
from syncalgos.reducers.dense import mean as mean
from syncalgos.reducers.dense import quantized as quantized
from syncalgos.reducers.feedback import ef21 as ef21
from syncalgos.reducers.feedback import error_feedback as error_feedback
from syncalgos.reducers.feedback import late as late
from syncalgos.reducers.low_rank import power_sgd as power_sgd
from syncalgos.reducers.reducer import Reducer as Reducer
from syncalgos.reducers.resolve import AnyReducer as AnyReducer
from syncalgos.reducers.resolve import resolve as resolve
from syncalgos.reducers.robust import clipped as clipped
from syncalgos.reducers.robust import median as median
from syncalgos.reducers.robust import trimmed as trimmed
from syncalgos.reducers.signs import sign as sign
from syncalgos.reducers.signs import tally as tally
from syncalgos.reducers.sparse import random_k as random_k
from syncalgos.reducers.sparse import row_sparse as row_sparse
from syncalgos.reducers.sparse import top_k as top_k
from syncalgos.reducers.stacking import Layered as Layered
