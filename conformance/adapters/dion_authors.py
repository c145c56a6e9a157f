# pyright: reportMissingImports=false
"""The authors' Dion, microsoft/dion: the reference and the asynchronous optimizer.

A file's matrix is (inputs, outputs); theirs is (outputs, inputs).
"""

import os

import torch
import torch.distributed as dist

from conformance.adapters.local_steps import (
    Settings,
    Vectors,
    join_leaves,
    read_settings,
    split_leaves,
)
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project, add_checkout
from conformance.adapters.torch_models import HeavyBall, list_gradients

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # it needs a compiler otherwise
COMMIT = add_checkout("dion")

from dion import dion as asynchronous  # noqa: E402
from dion import dion_reference  # noqa: E402

MODULES = {"reference": dion_reference, "asynchronous": asynchronous}


def make_optimizer(kind: str, matrices, vectors_and_scalars, settings: Settings):
    options = {"qr_method": "qr"} if kind == "reference" else {}
    lion = {
        "params": vectors_and_scalars,
        "algorithm": "lion",
        "betas": (0.95, 0.98),
        "beta1": 0.95,
        "beta2": 0.98,
    }
    return MODULES[kind].Dion(
        [{"params": matrices}, lion],
        replicate_mesh=dist.group.WORLD,
        lr=1.0,
        mu=settings["local_momentum"],
        weight_decay=0.0,
        rank_fraction=settings["rank_fraction"],
        epsilon=1e-8,
        **options,
    )


def take_p_of_inputs(optimizer):
    """Treats a matrix as one whose outputs are sharded."""
    find_config = optimizer._get_dion_param_config

    def find_other_config(param):
        config = find_config(param)
        config.is_transposed = param.ndim == 2
        return config

    optimizer._get_dion_param_config = find_other_config


def give_q(vectors: Vectors):
    q = torch.tensor(vectors["drawn"][0]["draw"], dtype=torch.float64)
    draw = torch.randn

    def randn(*shape, **options):
        size = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        if tuple(size) == tuple(q.shape):
            return q.to(options.get("dtype") or torch.float64).clone()
        return draw(*shape, **options)

    torch.randn = randn


def read_leaves(vectors: Vectors, vector, is_transposed: bool):
    """Returns a vector's leaves as their optimizer takes them."""
    leaves = []
    for leaf in split_leaves(vectors, vector).values():
        leaf = leaf.T if leaf.ndim == 2 and is_transposed else leaf
        leaves.append(torch.tensor(leaf.reshape(leaf.shape or (1,)).copy()))
    return leaves


def train(
    worker: int, vectors: Vectors, kind: str, is_transposed: bool, has_p_of_inputs: bool
):
    settings = read_settings(vectors)
    start = torch.tensor(vectors["start"], dtype=torch.float64).numpy()
    params = [
        torch.nn.Parameter(leaf) for leaf in read_leaves(vectors, start, is_transposed)
    ]
    matrices = [param for param in params if param.ndim == 2]
    vectors_and_scalars = [param for param in params if param.ndim != 2]
    optimizer = make_optimizer(kind, matrices, vectors_and_scalars, settings)
    if has_p_of_inputs:
        take_p_of_inputs(optimizer)
    torch.manual_seed(0)  # of a Q of another shape than the file's
    give_q(vectors)
    heavy_ball = HeavyBall(params, vectors, 1.0)
    path = []
    for gradient in list_gradients(vectors, worker):
        leaves = read_leaves(vectors, gradient.numpy(), is_transposed)
        for param, leaf in zip(params, leaves, strict=True):
            param.grad = leaf
        heavy_ball.step(optimizer.step)
        arrays = [param.detach().numpy() for param in params]
        path.append(
            join_leaves(x.T if x.ndim == 2 and is_transposed else x for x in arrays)
        )
    return path


SUPPLIED = "the file's Q in the place of its draw, and the heavy ball takes its step"
LONGER_SIDE = Cause(
    "differs by choice",
    "P has the longer side by default, as a comment says (dim0 >= dim1, other where "
    "sharded); in the file it has the inputs",
)


def rows():
    for kind in MODULES:
        yield AgreementRow(
            f"{kind} Dion, P of the inputs",
            "dion",
            in_processes(train, kind, True, True),
            1e-5,
            help=f"{SUPPLIED}; a matrix counts as one whose outputs are sharded",
        )
        for is_transposed in (True, False):
            shape = "outputs, inputs" if is_transposed else "inputs, outputs"
            yield AgreementRow(
                f"{kind} Dion, matrix ({shape})",
                "dion",
                in_processes(train, kind, is_transposed, False),
                1e-5,
                help=SUPPLIED,
                cause=LONGER_SIDE,
            )


PROJECT = Project("Dion (authors)", COMMIT, list(rows()))
