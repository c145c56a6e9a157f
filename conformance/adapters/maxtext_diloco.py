# pyright: reportMissingImports=false
"""MaxText's DiLoCo by drjax, its four replicas in one process.

Three of its modules that DiLoCo does not need, of configurations and checkpoints, are
stubs.
"""

import logging
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, struct

from conformance.adapters.local_steps import (
    Settings,
    Vectors,
    follow,
    read_settings,
    split_leaves,
)
from conformance.adapters.rows import AgreementRow, Cause, Project, add_checkout

jax.config.update("jax_enable_x64", True)
COMMIT = add_checkout("maxtext", "src")


class TrainStateNNX(struct.PyTreeNode):
    """The model and the optimizer of a replica, as MaxText's class of that name."""

    model: Any
    optimizer: Any


class HeavyBallState(struct.PyTreeNode):
    step: Any
    momentum: Any


def add_stub(name, **attributes):
    """Makes a module of these attributes importable; returns it."""
    module = ModuleType(name)
    vars(module).update(attributes)
    sys.modules[name] = module
    return module


pyconfig = add_stub("maxtext.configs.pyconfig", HyperParameters=object)
add_stub("maxtext.configs", __path__=[], pyconfig=pyconfig)
train_state = add_stub("maxtext.common.train_state_nnx", TrainStateNNX=TrainStateNNX)
add_stub("maxtext.common", __path__=[], train_state_nnx=train_state)
add_stub(
    "maxtext.trainers.diloco.utils.spmd_diloco_checkpointing",
    from_diloco_checkpoint_dict=None,
    is_diloco_checkpoint=None,
    restore_diloco_checkpoint=None,
    to_diloco_checkpoint_dict=None,
)
logging.disable(logging.WARNING)

from maxtext.trainers.diloco import diloco  # noqa: E402


class Layers(nnx.Module):
    """The stacked layers, of which MaxText makes a fragment: bias and kernel."""

    def __init__(self, leaves):
        self.bias = nnx.Param(leaves["bias"][None])
        self.kernel = nnx.Param(leaves["kernel"][None])


class MaxTextModel(nnx.Module):
    def __init__(self, leaves):
        self.layers = Layers(leaves)
        self.readout = nnx.Param(leaves["readout"])
        self.scale = nnx.Param(leaves["scale"])


def make_state(vectors: Vectors, vector: np.ndarray):
    leaves = split_leaves(vectors, np.asarray(vector))
    return nnx.state(
        MaxTextModel({name: jnp.array(leaf) for name, leaf in leaves.items()})
    )


def flatten_replicas(vectors: Vectors, state):
    """Returns the params of all replicas, (workers, size), in the file's order."""
    arrays = {
        jax.tree_util.keystr(path): np.asarray(leaf).reshape(vectors["workers"], -1)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }
    leaves = []
    for name in vectors["leaves"]:
        [leaf] = [array for path, array in arrays.items() if name in path]
        leaves.append(leaf)
    return np.concatenate(leaves, axis=1)


def train(first_step: int, more_settings):
    """Returns the run of a row.

    Args:
        first_step: where the replicas' count of steps begins.
        more_settings: MaxText's settings by those of a file.
    """

    def run(vectors: Vectors):
        settings = read_settings(vectors)
        inner_optimizer = vectors["inner_optimizer"]
        config = SimpleNamespace(
            num_diloco_replicas=vectors["workers"],
            diloco_outer_lr=settings["outer_lr"],
            diloco_outer_momentum=settings["outer_momentum"],
            diloco_sync_period=settings["period"],
            **more_settings(settings),
        )

        def train_step(state, gradient, key):
            old_momentum = state.optimizer.momentum
            momentum = jax.tree.map(
                lambda m, g: inner_optimizer["momentum"] * m + g, old_momentum, gradient
            )
            model = jax.tree.map(
                lambda x, m: x - inner_optimizer["learning_rate"] * m,
                state.model,
                momentum,
            )
            opt_state = HeavyBallState(state.optimizer.step + 1, momentum)
            return TrainStateNNX(model, opt_state), {}

        def init():
            model = make_state(vectors, vectors["start"])
            zeros = jax.tree.map(jnp.zeros_like, model)
            count = jnp.full((), first_step, jnp.int32)
            return TrainStateNNX(model, HeavyBallState(count, zeros))

        state, _ = diloco.build_diloco_state(config, init)
        compiled_step = diloco.build_diloco_train_step(config, train_step)
        states = [state]

        def step(gradients):
            models = [make_state(vectors, gradient) for gradient in gradients]
            stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *models)
            state, _ = compiled_step(states[-1], stacked, jax.random.PRNGKey(0))
            states.append(state)
            return list(flatten_replicas(vectors, state.inner_state.model))

        return follow(vectors, step)

    return run


def set_plain(settings: Settings):
    return {"enable_streaming_diloco": False}


def set_streaming(settings: Settings):
    return {
        "enable_streaming_diloco": True,
        "num_diloco_fragments": settings["fragments"],
        "num_decoder_layers": 1,
        "use_sequential_layers": True,
        "param_scan_axis": 0,
        "num_communication_overlapping_steps": settings["delay"],
        "communication_overlapping_alpha": settings["alpha"],
    }


COUNTER = Cause(
    "differs by choice",
    "fragments are sent one step later in a period than in the file, whose phases are "
    "torchft's; the paper leaves them open",
)
STUBS = "three modules of configurations and checkpoints as stubs"

PROJECT = Project(
    "MaxText",
    COMMIT,
    [
        AgreementRow("DiLoCo", "diloco", train(0, set_plain), help=STUBS),
        AgreementRow(
            "streaming DiLoCo, count of steps from 1",
            "streaming_diloco",
            train(1, set_streaming),
            help=f"{STUBS}; the count of steps starts at 1",
        ),
        AgreementRow(
            "streaming DiLoCo",
            "streaming_diloco",
            train(0, set_streaming),
            help=STUBS,
            cause=COUNTER,
        ),
    ],
)
