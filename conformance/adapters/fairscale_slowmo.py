# pyright: reportMissingImports=false
"""fairscale: SlowMoDistributedDataParallel around local SGD, which needs float32."""

import fairscale
import torch
from fairscale.experimental.nn.data_parallel import (
    SlowMoBaseAlgorithm,
    SlowMoDistributedDataParallel,
)

from conformance.adapters.local_steps import Vectors, find_rate, read_settings
from conformance.adapters.processes import in_processes
from conformance.adapters.rows import AgreementRow, Cause, Project
from conformance.adapters.torch_models import (
    TorchModel,
    flatten,
    list_gradients,
    make_sgd,
)


def slowmo(worker: int, vectors: Vectors, is_memory_efficient: bool, inits_first: bool):
    torch.cuda.synchronize = lambda *args: None  # which it calls on CPUs, too
    settings = read_settings(vectors)
    model = TorchModel(vectors, dtype=torch.float32)
    parallel = SlowMoDistributedDataParallel(
        model,
        nprocs_per_node=1,
        slowmo_base_algorithm=SlowMoBaseAlgorithm.LOCALSGD,
        slowmo_momentum=settings["slow_momentum"],
        slowmo_lr=settings["slow_lr"],
        slowmo_frequency=settings["period"],
        localsgd_frequency=settings["period"],
        slowmo_memory_efficient=is_memory_efficient,
    )
    optimizer = make_sgd(parallel.parameters(), vectors)
    if inits_first:
        parallel._init_global_momentum_buffers(optimizer)
    path = []
    for step, gradient in enumerate(list_gradients(vectors, worker, torch.float32)):
        optimizer.param_groups[0]["lr"] = find_rate(vectors, step)
        optimizer.zero_grad()
        parallel(gradient).backward()
        optimizer.step()
        parallel.perform_slowmo(optimizer)
        path.append(flatten(model))
    return path


ON_CPUS = "torch.cuda.synchronize replaced, which it calls on CPUs, too"
EARLY = f"{ON_CPUS}; the buffers are made before step 0"
ANCHOR = (
    "the first anchor is the params after step 0, not those at the start "
    "(algorithm 1 of the paper, x at t = 0): the buffers are made by the first "
    "perform_slowmo, which runs after a step"
)
LATE = Cause("fault", ANCHOR, "fairscale_slowmo.py")
UNEQUAL = Cause(
    "fault",
    f"{ANCHOR}; as no average follows, workers stay apart by their first step for ever",
    "fairscale_slowmo.py",
)


def rows():
    for file in ("slowmo", "slowmo.constant_rate"):
        for is_memory_efficient, cause in ((True, LATE), (False, UNEQUAL)):
            name = f"SlowMo(slowmo_memory_efficient={is_memory_efficient})"
            yield AgreementRow(
                f"{name}, buffers first",
                file,
                in_processes(slowmo, is_memory_efficient, True),
                1e-5,
                EARLY,
            )
            yield AgreementRow(
                name,
                file,
                in_processes(slowmo, is_memory_efficient, False),
                1e-5,
                ON_CPUS,
                cause,
            )


PROJECT = Project("fairscale", fairscale.__version__, list(rows()))
