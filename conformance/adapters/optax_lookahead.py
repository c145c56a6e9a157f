"""optax: lookahead."""

from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from conformance.adapters.local_steps import Vectors, find_rate, follow, read_settings
from conformance.adapters.rows import AgreementRow, Project

jax.config.update("jax_enable_x64", True)


def lookahead(vectors: Vectors):
    settings = read_settings(vectors)
    momentum = vectors["inner_optimizer"]["momentum"]
    optimizer = optax.lookahead(
        optax.sgd(find_rate(vectors, 0), momentum=momentum),
        sync_period=settings["period"],
        slow_step_size=settings["slow_lr"],
    )
    params = optax.LookaheadParams.init_synced(jnp.array(vectors["start"]))
    states: list[Any] = [(params, optimizer.init(params))]

    def step(gradients):
        params, opt_state = states[-1]
        updates, opt_state = optimizer.update(
            jnp.array(gradients[0]), opt_state, params
        )
        states.append((optax.apply_updates(params, updates), opt_state))
        return [np.asarray(states[-1][0].fast)]

    return follow(vectors, step)


PROJECT = Project(
    "optax",
    version("optax"),
    [AgreementRow("lookahead", "lookahead.one_worker", lookahead)],
)
