# pyright: reportMissingImports=false
"""FedJAX: fed_avg with its server optimizers.

A client takes one step of SGD at rate 1 along the file's pseudo-gradient, so FedJAX's
loop over clients, its weighted mean and its server optimizer do the round.
"""

from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)
if not hasattr(jax, "tree_map"):
    # FedJAX calls it.
    jax.tree_map = jax.tree_util.tree_map  # pyright: ignore[reportAttributeAccessIssue]

import fedjax  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402

from conformance.adapters.local_steps import (  # noqa: E402
    Settings,
    Vectors,
    follow_server,
    read_settings,
)
from conformance.adapters.rows import AgreementRow, Cause, Project  # noqa: E402


def compute_mean_gradient(params, batch, key):
    return {"x": jnp.mean(batch["gradient"], 0)}


def serve(make_optimizer, vectors: Vectors, starts_v_at_tau2: bool = False):
    """Runs fed_avg with the server optimizer made of the file's settings."""
    settings = read_settings(vectors)
    algorithm = fed_avg.federated_averaging(
        compute_mean_gradient,
        fedjax.optimizers.sgd(1.0),
        make_optimizer(settings),
        fedjax.ShuffleRepeatBatchHParams(batch_size=1, num_epochs=1),
    )
    state = algorithm.init({"x": jnp.array(vectors["start"])})
    if starts_v_at_tau2:
        state = start_at_tau2(state, settings["tau"])
    states = [state]

    def sync(params):
        anchor = np.asarray(states[-1].params["x"])
        clients = []
        for worker, vector in enumerate(params):
            data = fedjax.ClientDataset({"gradient": (anchor - vector)[None]})
            clients.append((b"%d" % worker, data, jax.random.PRNGKey(worker)))
        state, _ = algorithm.apply(states[-1], clients)
        states.append(state)
        return np.asarray(state.params["x"])

    return follow_server(vectors, sync)


def start_at_tau2(state, tau):
    """Sets the second moments of a server's optimizer to τ²."""

    def has_moments(part):
        return hasattr(part, "nu")

    def set_moments(part):
        if not has_moments(part):
            return part
        return part._replace(nu={"x": jnp.full_like(part.nu["x"], tau**2)})

    opt_state = jax.tree_util.tree_map(
        set_moments, state.opt_state, is_leaf=has_moments
    )
    return fed_avg.ServerState(state.params, opt_state)


def make_sgd(settings: Settings):
    return fedjax.optimizers.sgd(1.0)


def make_momentum(settings: Settings):
    return fedjax.optimizers.sgd(
        settings["block_lr"], momentum=settings["block_momentum"]
    )


def make_nesterov(settings: Settings):
    return fedjax.optimizers.sgd(
        settings["outer_lr"], momentum=settings["outer_momentum"], nesterov=True
    )


def make_adam(settings: Settings, make=fedjax.optimizers.adam):
    return make(
        settings["outer_lr"],
        b1=settings["b1"],
        b2=settings["b2"],
        eps=settings["tau"],
    )


def make_adagrad(settings: Settings):
    return fedjax.optimizers.adagrad(
        settings["outer_lr"],
        initial_accumulator_value=settings["tau"] ** 2,
        eps=settings["tau"],
    )


make_yogi = partial(make_adam, make=fedjax.optimizers.yogi)

CORRECTED = Cause(
    "differs by choice",
    "optax's Adam, documented as such: v starts at 0, and both moments are corrected "
    "for that; algorithm 2 of Reddi et al. has neither",
)
YOGI = Cause(
    "differs by choice",
    "optax's Yogi, documented as such: both moments start at 1e-6 and are corrected",
)
ADAGRAD = Cause(
    "differs by choice",
    "optax's Adagrad, documented as such: τ is added inside of the square root",
)

PROJECT = Project(
    "FedJAX",
    version("fedjax"),
    [
        AgreementRow(
            "fed_avg, server sgd(1)", "model_averaging", partial(serve, make_sgd)
        ),
        AgreementRow(
            "fed_avg, server sgd(momentum)", "bmuf.plain", partial(serve, make_momentum)
        ),
        AgreementRow(
            "fed_avg, server sgd(nesterov)",
            "diloco",
            partial(serve, make_nesterov),
        ),
        AgreementRow(
            "fed_avg, server adam",
            "fedopt",
            partial(serve, make_adam),
            cause=CORRECTED,
        ),
        AgreementRow(
            "fed_avg, server adam, v from τ²",
            "fedopt",
            partial(serve, make_adam, starts_v_at_tau2=True),
            help="v set to τ² before the first round",
            cause=CORRECTED,
        ),
        AgreementRow(
            "fed_avg, server yogi",
            "fedopt.yogi",
            partial(serve, make_yogi),
            cause=YOGI,
        ),
        AgreementRow(
            "fed_avg, server adagrad",
            "fedopt.adagrad",
            partial(serve, make_adagrad),
            cause=ADAGRAD,
        ),
    ],
)
