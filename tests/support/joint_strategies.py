"""Many strategies in one program: side by side, each trains a model of its own.

A program of twenty algorithms is traced and compiled in a third of the time that twenty
programs need. Params are {name: params}.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

from syncalgos import Replica, Strategy


def strategies(
    strategies_by_name: Mapping[str, Strategy], axis: Any = None
) -> Strategy:
    """The strategy that leaves each model to its own.

    Args:
        strategies_by_name: made for this axis.
        axis: a name or several; None is that of the engine.
    """

    def init(params):
        return {
            name: strategy.init(params[name])
            for name, strategy in strategies_by_name.items()
        }

    def reduce(grads, replica, state, step):
        def act(name):
            strategy = strategies_by_name[name]
            model = _replica(replica, name)
            return strategy.reduce(grads[name], model, state[name], step)

        return _unzip({name: act(name) for name in strategies_by_name})

    def sync(replica, state, step):
        def act(name):
            return strategies_by_name[name].sync(
                _replica(replica, name), state[name], step
            )

        replicas, state = _unzip({name: act(name) for name in strategies_by_name})
        params = {name: model.params for name, model in replicas.items()}
        opt_state = {name: model.opt_state for name, model in replicas.items()}
        return replica._replace(params=params, opt_state=opt_state), state

    def center(params, state):
        return {
            name: strategy.center(params[name], state[name])
            for name, strategy in strategies_by_name.items()
        }

    return Strategy(init, reduce, sync, center, axis=axis)


def optimizers(
    optimizers_by_name: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformation:
    """The optimizer that leaves each model to its own."""

    def init(params):
        return {
            name: optimizer.init(params[name])
            for name, optimizer in optimizers_by_name.items()
        }

    def update(grads, state, params):
        def update_model(name):
            return optimizers_by_name[name].update(
                grads[name], state[name], params[name]
            )

        return _unzip({name: update_model(name) for name in optimizers_by_name})

    return optax.GradientTransformation(init, update)


def loss_of_all(loss):
    """The sum of (params, batch) -> loss over all models."""

    def total(params, batch):
        losses = [loss(model_params, batch) for model_params in params.values()]
        return jnp.sum(jnp.stack(losses))

    return total


def _replica(replica: Replica, name: str) -> Replica:
    params = replica.params[name]
    return Replica(params, replica.opt_state[name], replica.buffers, replica.loss)


def _unzip(pairs: Mapping[str, tuple[Any, Any]]) -> tuple[Any, Any]:
    """(firsts, seconds) of pairs, by name."""
    firsts = {name: pair[0] for name, pair in pairs.items()}
    seconds = {name: pair[1] for name, pair in pairs.items()}
    return firsts, seconds
