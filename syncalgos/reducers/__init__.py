"""Reducers combine values over the workers: optax GradientTransformations.

A reducer takes one worker's tree and returns the combined tree, identical on all
workers. It serves gradients (`reduce_with`), params (`average`) and outer gradients
(`outer_step`) alike. Made without `axis`, it takes the axis of the strategy around it.
"""

from syncalgos.reducers._chunks import chunked_top_k as chunked_top_k
from syncalgos.reducers._dense import bf16 as bf16
from syncalgos.reducers._dense import cast as cast
from syncalgos.reducers._dense import fp16 as fp16
from syncalgos.reducers._dense import low_bit as low_bit
from syncalgos.reducers._dense import mean as mean
from syncalgos.reducers._dense import quantized as quantized
from syncalgos.reducers._feedback import ef21 as ef21
from syncalgos.reducers._feedback import error_feedback as error_feedback
from syncalgos.reducers._feedback import late as late
from syncalgos.reducers._low_rank import power_sgd as power_sgd
from syncalgos.reducers._reducer import Reducer as Reducer
from syncalgos.reducers._resolve import AnyReducer as AnyReducer
from syncalgos.reducers._resolve import resolve as resolve
from syncalgos.reducers._robust import clipped as clipped
from syncalgos.reducers._robust import median as median
from syncalgos.reducers._robust import trimmed as trimmed
from syncalgos.reducers._signs import sign as sign
from syncalgos.reducers._signs import tally as tally
from syncalgos.reducers._sparse import random_k as random_k
from syncalgos.reducers._sparse import row_sparse as row_sparse
from syncalgos.reducers._sparse import top_k as top_k
from syncalgos.reducers._stacking import Layered as Layered
