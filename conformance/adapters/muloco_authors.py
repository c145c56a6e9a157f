# pyright: reportMissingImports=false
"""The authors' MuLoCo, facebookresearch/MuLoCo: the outer optimizer, QuantizedOuterSGD.

Its compressors are deterministic, so the file's rounding takes the place of one. All
workers are in one process, as its collectives are torchft's.
"""

from math import ceil

import numpy as np
import torch

from conformance.adapters.local_steps import Vectors, follow, read_settings
from conformance.adapters.rows import AgreementRow, Cause, Project, add_checkout
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    make_sgd,
    set_gradients,
)

COMMIT = add_checkout("MuLoCo", "torchtitan", "torchtitan", "components")

from quantized_outer_sgd import QuantizedOuterSGD  # noqa: E402


class WholeNumbers:
    """A compressor that sends values as they are."""

    def _quantize(self, tensor):
        return tensor.clone(), torch.zeros(1)

    def _dequantize(self, values, metadata):
        return values


class Rounding(WholeNumbers):
    """⌊7 x / s + u⌋ s / 7 by parts of a leaf, with the u of each leaf in turn."""

    def __init__(self, draws):
        self.draws = list(draws)  # (parts, size of a part) for each leaf

    def _quantize(self, tensor):
        draws = self.draws.pop(0)
        values = tensor.reshape(-1).clone()
        size = draws.shape[1]
        for part, u in enumerate(draws):
            x = values[part * size : (part + 1) * size]
            scale = x.abs().max() if x.numel() else torch.tensor(0.0)
            if scale > 0:
                x.copy_(torch.floor(7 * (x / scale) + u[: x.numel()]) * scale / 7)
        return values.reshape(tensor.shape), torch.zeros(1)


def read_draws(vectors: Vectors, step: int, worker: int):
    """Returns a worker's draws at a sync, (workers + 1, size of a part) by leaf."""
    [numbers] = [
        entry["draw"] for entry in vectors["drawn"] if entry["at"] == [step, worker]
    ]
    numbers = torch.tensor(np.ravel(numbers))
    rows = vectors["workers"] + 1
    draws = []
    start = 0
    for shape in vectors["leaves"].values():
        part = ceil(int(np.prod(shape)) / vectors["workers"])
        draws.append(numbers[start : start + rows * part].reshape(rows, part))
        start += rows * part
    return draws


def make_compressors(vectors: Vectors, step: int):
    """Returns those with which workers send, and what makes that of the means."""
    workers = vectors["workers"]
    if "drawn" not in vectors:
        return [WholeNumbers()] * workers, lambda: WholeNumbers()
    draws = [read_draws(vectors, step, worker) for worker in range(workers)]
    senders = []
    for rows in draws:
        senders.append(Rounding([leaf[:workers] for leaf in rows]))

    def make_mean_rounding():
        mean_rows = []
        for leaf in range(len(vectors["leaves"])):
            last_rows = [rows[leaf][-1] for rows in draws]
            mean_rows.append(torch.stack(last_rows))
        return Rounding(mean_rows)

    return senders, make_mean_rounding


def outer_sgd(has_plain_error: bool):
    """Returns the run of a row.

    Args:
        has_plain_error: whether the outer rate is taken out of the error buffer.
    """

    def run(vectors: Vectors):
        settings = read_settings(vectors)
        workers = vectors["workers"]
        models = [TorchModel(vectors, least_axes=1) for _ in range(workers)]
        optimizers = [make_sgd(model.parameters(), vectors) for model in models]
        outers = [
            QuantizedOuterSGD(
                model.parameters(),
                lr=settings["outer_lr"],
                momentum=settings["outer_momentum"],
                nesterov=True,
                error_decay=settings["decay"] or 0.0,
                error_feedback_alpha=1.0,
            )
            for model in models
        ]
        anchor = copy_params(models[0])
        steps = iter(range(len(vectors["steps"])))

        def sync(step: int):
            senders, make_mean_rounding = make_compressors(vectors, step)
            messages = []
            for model, outer, sender in zip(models, outers, senders, strict=True):
                outer.compressor = sender
                if has_plain_error:
                    outer.lr = 1.0
                message = {}
                outer._save_grads(message, anchor, model)
                messages.append(message)
            gathered = {}
            for name in messages[0]:
                gathered[name] = [message[name] for message in messages]
            for model, outer in zip(models, outers, strict=True):
                outer.compressor = make_mean_rounding()
                set_params(model, anchor)
                outer._set_grads(dict(gathered), model)  # which empties it
                outer.step()
            anchor.update(copy_params(models[0]))

        def take_step(gradients):
            step = next(steps)
            for model, optimizer, gradient in zip(
                models, optimizers, gradients, strict=True
            ):
                set_gradients(model, gradient)
                optimizer.step()
            if (step + 1) % settings["period"] == 0:
                sync(step)
            return [flatten(model) for model in models]

        return follow(vectors, take_step)

    return run


def copy_params(model):
    return {name: x.detach().clone() for name, x in model.named_parameters()}


@torch.no_grad()
def set_params(model, values):
    for name, param in model.named_parameters():
        param.copy_(values[name])


PLUGGED = "the file's rounding as its compressor, workers in one process"
TWICE = Cause(
    "undecided",
    "the outer rate multiplies what enters the error buffer and the outer step, too; "
    "algorithm 1 has it in the step alone",
)

PROJECT = Project(
    "MuLoCo (authors)",
    COMMIT,
    [
        AgreementRow(
            "QuantizedOuterSGD", "muloco", outer_sgd(False), help=PLUGGED, cause=TWICE
        ),
        AgreementRow(
            "QuantizedOuterSGD, rate 1 in the error buffer",
            "muloco",
            outer_sgd(True),
            help=f"{PLUGGED}; the rate as 1 where the error is taken",
        ),
        AgreementRow(
            "QuantizedOuterSGD, whole numbers",
            "muloco.plain",
            outer_sgd(True),
            help="a compressor that changes nothing, workers in one process; the rate "
            "as 1 where the error is taken",
        ),
        AgreementRow(
            "QuantizedOuterSGD, whole numbers, as it is",
            "muloco.plain",
            outer_sgd(False),
            help="a compressor that changes nothing, workers in one process",
            cause=TWICE,
        ),
    ],
)
