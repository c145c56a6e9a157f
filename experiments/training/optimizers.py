"""Inner optimizers and learning rate schedules by name."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from experiments.training.config import Settings
from syncalgos import Strategy, average, checks, reset
from syncalgos.collectives import PyTree

Schedule = float | Callable[[Any], Any]

MUON_LEAVES = "muon_weight_dimension_numbers"

# --opt-state-at-sync: the strategy for the inner optimizer's state.
AT_SYNC: dict[str, Callable[[optax.GradientTransformation], Strategy]] = {
    "keep": lambda optimizer: Strategy(),
    "reset": reset,
    "average": lambda optimizer: average("opt_state"),
}


def make_inner_optimizer(
    config: Settings, muon: Callable[[PyTree], PyTree] | None
) -> tuple[Schedule, optax.GradientTransformation]:
    """Makes the learning rate's schedule, and the inner optimizer with it.

    Args:
        config: the settings.
        muon: see `Task.muon`.

    Raises:
        ValueError: the optimizer cannot be used with these settings.
    """
    c = config
    rate = schedule(c.schedule, c.lr, c.steps, c.warmup_steps)
    optimizer = make_optimizer(
        c.optimizer,
        rate,
        weight_decay=c.weight_decay,
        clip_norm=c.clip_norm,
        muon=muon,
        momentum=c.momentum,
        b1=c.b1,
        b2=c.b2,
    )
    if c.schedule == "plateau":
        optimizer = optax.chain(optimizer, plateau(c.steps))
    return rate, optimizer


def schedule(name: str, lr: float, steps: int, warmup_steps: int) -> Schedule:
    """Returns the learning rate of each local step.

    Args:
        name: constant; linear or cosine, which fall to 0 at the end; wsd (warmup,
            stable, decay), constant and then linear to 0 over the last fifth; step, a
            tenth after half and a hundredth after three quarters of the steps (He et
            al., 2016, CIFAR-10); or plateau, constant here and lowered by `plateau`.
        lr: the highest rate.
        steps: the length of the run.
        warmup_steps: local steps over which the rate first rises from
            lr / warmup_steps.

    Returns:
        A number if the rate is constant, else an optax schedule.
    """
    if name in ("constant", "plateau") and not warmup_steps:
        return lr
    steps_after_warmup = max(steps - warmup_steps, 1)
    decay_steps = min(max(steps // 5, 1), steps_after_warmup)
    main = {
        "constant": lambda: optax.constant_schedule(lr),
        "linear": lambda: optax.linear_schedule(lr, 0.0, steps_after_warmup),
        "wsd": lambda: optax.linear_schedule(
            lr, 0.0, decay_steps, steps_after_warmup - decay_steps
        ),
        "plateau": lambda: optax.constant_schedule(lr),
        "cosine": lambda: optax.cosine_decay_schedule(lr, steps_after_warmup),
        "step": lambda: _steps_down(lr, steps, warmup_steps),
    }[name]()
    if not warmup_steps:
        return main
    # It starts at lr / warmup_steps: a first step at rate 0 would train nothing.
    rise = optax.linear_schedule(lr / warmup_steps, lr, max(warmup_steps - 1, 1))
    return optax.join_schedules([rise, main], [warmup_steps])


def plateau(steps: int) -> optax.GradientTransformationExtraArgs:
    """Divides updates by ten each time the loss has not fallen for 5 % of a run.

    After the third time they stay at a thousandth.

    Args:
        steps: the length of the run.
    """
    # Mini-batches are noisy, so that means over hundredths of the run are compared.
    return optax.contrib.reduce_on_plateau(
        factor=0.1, patience=5, accumulation_size=max(1, steps // 100), min_scale=1e-3
    )


def current_rate(config: Settings, opt_state: PyTree, steps_done: int) -> float:
    """Returns the learning rate of the last of the steps that are done.

    Args:
        config: the settings.
        opt_state: the state of all workers, which have the same rate.
        steps_done: local steps done; 0 gives the rate of the first step.
    """
    c = config
    rate = schedule(c.schedule, c.lr, c.steps, c.warmup_steps)
    scale = 1.0
    if c.schedule == "plateau":  # it comes last: see `make_inner_optimizer`
        scale = float(np.ravel(opt_state[-1].scale.addressable_shards[0].data)[0])
    if not callable(rate) and scale == 1:
        return rate
    if callable(rate):
        rate = rate(max(steps_done - 1, 0))
    return float(f"{float(rate) * scale:.6g}")  # as float32 has it


def _steps_down(lr: float, steps: int, warmup_steps: int) -> Callable[[Any], Any]:
    """Returns the rate: a tenth after half of the steps, a hundredth after 3/4."""

    def rate(count: jax.Array) -> jax.Array:
        progress = (count + warmup_steps) / steps
        late_factor = jnp.where(progress >= 0.5, 0.1, 1.0)
        return lr * jnp.where(progress >= 0.75, 0.01, late_factor)

    return rate


# Optimizers of optax that cannot be inner ones, and why.
_REFUSED = {
    "lookahead": "trains a pair of models: use --algo lookahead --optimizer sgd",
    "lbfgs": "cannot be used here: its line search needs the loss at other params",
    "noisy_sgd": "cannot be used here: it needs a random key",
    "sophia": "cannot be used here: it needs the loss function",
    **dict.fromkeys(
        ("schedule_free_adamw", "schedule_free_sgd"),
        "evaluates another model than it trains, which syncs do not average: use "
        "--optimizer adamw or sgd, with a --schedule",
    ),
}


@functools.cache
def find_optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Returns optax's optimizers, contrib included, by name."""
    optimizers = {}
    for module in (optax.contrib, optax):
        for name, factory in vars(module).items():
            is_private = name.startswith(("_", "scale_by_"))
            if not is_private and name not in _REFUSED and _is_optimizer(factory):
                optimizers[name] = factory
    return optimizers


def _is_optimizer(factory: Any) -> bool:
    """Whether a learning rate comes first and is all that must be given."""
    if not inspect.isfunction(factory):
        return False
    parameters = inspect.signature(factory).parameters
    required = {name for name, p in parameters.items() if p.default is p.empty}
    return [*parameters][:1] == ["learning_rate"] and required <= {"learning_rate"}


def make_optimizer(
    name: str,
    lr: Schedule,
    weight_decay: float | None = None,
    clip_norm: float | None = None,
    muon: Callable[[PyTree], PyTree] | None = None,
    **momenta: float | None,
) -> optax.GradientTransformation:
    """Makes an inner optimizer: clip, then decay, then the optimizer.

    An optimizer with its own `weight_decay` (adamw, muon) gets it as an argument; for
    others it is applied before momentum, as in torch and optax. For `muon` see
    `Task.muon`. `momentum`, `b1` and `b2` keep optax's defaults unless given.

    Raises:
        ValueError: the name is unknown, the optimizer cannot be used here, or it has no
            such momentum or decay.
    """
    if name in _REFUSED:
        raise ValueError(f"--optimizer {name} {_REFUSED[name]}")
    factories = find_optimizers()
    factory = factories[checks.one_of("optimizer", name, sorted(factories))]
    parameters = {k: inspect.signature(x).parameters for k, x in factories.items()}
    arguments: dict[str, Any] = {k: x for k, x in momenta.items() if x is not None}
    missing = [x for x in arguments if x not in parameters[name]]
    if missing:
        takers = ", ".join(sorted(k for k, x in parameters.items() if missing[0] in x))
        raise ValueError(
            f"--optimizer {name} has no --{missing[0]} (these have: {takers})"
        )
    first_transforms: list[optax.GradientTransformation] = []
    if clip_norm is not None:
        first_transforms.append(optax.clip_by_global_norm(clip_norm))
    if weight_decay is not None and "weight_decay" in parameters[name]:
        arguments["weight_decay"] = weight_decay
    elif isinstance(weight_decay, jax.Array) or weight_decay:  # a traced one may be 0
        first_transforms.append(optax.add_decayed_weights(weight_decay))

    def build() -> optax.GradientTransformation:
        optimizer = factory(lr, **arguments)
        if not first_transforms:
            return optimizer
        return optax.chain(*first_transforms, optimizer)

    # Tested on shapes: a factory may accept a schedule that its update cannot use.
    try:
        optimizer = build()
        params = {"w": jax.ShapeDtypeStruct((2, 2), jnp.float32)}
        full = optax.with_extra_args_support(optimizer)
        jax.eval_shape(lambda p: full.update(p, full.init(p), p, value=1.0), params)
    except Exception as error:  # optax's optimizers raise different errors
        if callable(lr):
            raise ValueError(
                f"--optimizer {name} refuses a schedule: {error}"
            ) from error
        raise ValueError(f"--optimizer {name} refuses these flags: {error}") from error
    if muon is None or MUON_LEAVES not in parameters[name]:
        return optimizer
    arguments[MUON_LEAVES] = muon  # only now: it may support only the task's own params
    return build()
