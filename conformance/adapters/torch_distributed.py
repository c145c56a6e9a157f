# pyright: reportMissingImports=false
"""torch.distributed: DDP, its averagers and its communication hooks."""

from collections import OrderedDict

import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import (
    PostLocalSGDState,
    post_localSGD_hook,
)
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.hierarchical_model_averager import (
    HierarchicalModelAverager,
)
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel

from conformance.adapters.local_steps import Vectors, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    follow_gradients,
    list_gradients,
    make_sgd,
)


def train_ddp(model, optimizer, vectors: Vectors, worker: int):
    """Takes each step by backward, with DDP's hook in between."""
    path = []
    for gradient in list_gradients(vectors, worker):
        optimizer.zero_grad()
        model(gradient).backward()
        optimizer.step()
        path.append(flatten(model.module))
    return path


def ddp(worker: int, vectors: Vectors):
    model = DistributedDataParallel(TorchModel(vectors))
    return train_ddp(model, make_sgd(model.parameters(), vectors), vectors, worker)


def train_averaged(model, averager, vectors: Vectors, worker: int):
    optimizer = make_sgd(model.parameters(), vectors)

    def take_step() -> None:
        optimizer.step()
        averager.average_parameters(model.parameters())

    return follow_gradients(model, vectors, worker, take_step)


def periodic(worker: int, vectors: Vectors, warmup_steps: int):
    period = read_settings(vectors)["period"]
    averager = PeriodicModelAverager(period, warmup_steps)
    return train_averaged(TorchModel(vectors), averager, vectors, worker)


def hierarchical(worker: int, vectors: Vectors, first_count: int):
    settings = read_settings(vectors)
    group_sizes = OrderedDict([(settings["inner_period"], 2), (settings["period"], 4)])
    averager = HierarchicalModelAverager(group_sizes, warmup_steps=0)
    averager.step = first_count
    return train_averaged(TorchModel(vectors), averager, vectors, worker)


def post_local(worker: int, vectors: Vectors, warmup_steps: int):
    settings = read_settings(vectors)
    model = DistributedDataParallel(TorchModel(vectors))
    state = PostLocalSGDState(
        None, None, settings["dense_steps"], post_local_gradient_allreduce=False
    )
    model.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(settings["period"], warmup_steps)
    optimizer = PostLocalSGDOptimizer(make_sgd(model.parameters(), vectors), averager)
    return train_ddp(model, optimizer, vectors, worker)


def powersgd(
    worker: int,
    vectors: Vectors,
    has_given_q: bool = True,
    least_axes: int = 1,
    warm_start: bool = True,
):
    settings = read_settings(vectors)
    if has_given_q:
        give_q(vectors)
    model = DistributedDataParallel(TorchModel(vectors, least_axes))
    state = powerSGD_hook.PowerSGDState(
        None,
        matrix_approximation_rank=settings["rank"],
        start_powerSGD_iter=settings["dense_steps"],
        min_compression_rate=settings["min_rate"],
        warm_start=warm_start,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train_ddp(model, make_sgd(model.parameters(), vectors), vectors, worker)


def give_q(vectors: Vectors):
    """Lets the hook draw the file's Q for the matrix; it calls torch.randn."""
    q = torch.tensor(vectors["drawn"][0]["draw"], dtype=torch.float64)

    def randn(*shape, dtype=None, **options):
        if shape[-2:] == tuple(q.shape):
            return q.reshape(shape).to(dtype)
        return torch.ones(shape, dtype=dtype)

    powerSGD_hook.torch.randn = randn


FIRST_ROUND = Cause(
    "differs by choice",
    "averages follow step 0 and each period from there: average_parameters documents "
    "that its count of steps, from 0, less warmup_steps, is divided by the period",
)
OWN_WARMUP = Cause(
    "differs by choice",
    "averages follow step start_localSGD_iter and each period from there; the class "
    "documents that both numbers must be equal",
)
COUNTER = Cause(
    "differs by choice",
    "all average after step 0 and each period from there: the class documents that the "
    "current step, which counts from 0, is divided by the period",
)
SCALAR = Cause(
    "fault",
    "IndexError once compression starts, for a parameter without axes: the hook takes "
    "tensor.shape[0] of it; the documents exclude none",
    "torch_powersgd_scalar.py",
    "IndexError",
)
NO_WARM_START = Cause(
    "differs by choice", "warm_start=False draws Q anew at each step, as documented"
)
OWN_Q = Cause("differs by choice", "Q is its own draw, by NumPy's seed: a file gives Q")

PROJECT = Project(
    "PyTorch",
    torch.__version__.partition("+")[0],
    [
        AgreementRow("DistributedDataParallel", "sync_sgd", in_processes(ddp)),
        AgreementRow(
            "PeriodicModelAverager(warmup_steps=3)",
            "model_averaging",
            in_processes(periodic, 3),
        ),
        AgreementRow(
            "PeriodicModelAverager(warmup_steps=0), the default",
            "model_averaging",
            in_processes(periodic, 0),
            cause=FIRST_ROUND,
        ),
        AgreementRow(
            "HierarchicalModelAverager",
            "hierarchical",
            in_processes(hierarchical, 1),
            help="its counter of steps starts at 1",
        ),
        AgreementRow(
            "HierarchicalModelAverager, counter from 0",
            "hierarchical",
            in_processes(hierarchical, 0),
            cause=COUNTER,
        ),
        AgreementRow(
            "PostLocalSGDOptimizer(warmup_steps=3)",
            "post_local_sgd",
            in_processes(post_local, 3),
        ),
        AgreementRow(
            "PostLocalSGDOptimizer(warmup_steps=start_localSGD_iter)",
            "post_local_sgd",
            in_processes(post_local, 5),
            cause=OWN_WARMUP,
        ),
        AgreementRow(
            "powerSGD_hook",
            "powersgd",
            in_processes(powersgd),
            help="the file's Q in the place of its draw, and one axis for the scalar",
        ),
        AgreementRow(
            "powerSGD_hook, scalar without axes",
            "powersgd",
            in_processes(powersgd, True, 0),
            help="the file's Q in the place of its draw",
            cause=SCALAR,
        ),
        AgreementRow(
            "powerSGD_hook(warm_start=False)",
            "powersgd",
            in_processes(powersgd, True, 1, False),
            help="the file's first Q, and one axis for the scalar",
            cause=NO_WARM_START,
        ),
        AgreementRow(
            "powerSGD_hook, its own Q",
            "powersgd",
            in_processes(powersgd, False),
            help="one axis for the scalar",
            cause=OWN_Q,
        ),
    ],
)
