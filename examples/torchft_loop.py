"""Train in torch with processes that come and go, by torchft.

    python examples/torchft_loop.py

starts a lighthouse and three processes. One of them is killed and started again, while
the others go on. docs/torchft.md explains it.
"""

import os
import signal
import subprocess
import sys
import time

import jax
import torch  # pyright: ignore[reportMissingImports]
from torchft.coordination import (  # pyright: ignore[reportMissingImports]
    LighthouseServer,
)
from torchft_members import Synced, join

import syncalgos

STEPS = 3000


def train(name, lighthouse, death_step=-1):
    torch.set_num_threads(1)  # of three processes on one machine
    jax.config.update("jax_platforms", "cpu")
    members = join(name, lighthouse)
    torch.manual_seed(0)  # all members start alike
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.002, momentum=0.9)
    strategy = syncalgos.diloco(20, axis=members.peers)
    synced = Synced(model, optimizer, members, strategy)
    torch.manual_seed(int.from_bytes(os.urandom(4), "big"))  # data of its own
    while synced.steps < STEPS:
        x = torch.randn(16, 8)
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        synced.step()
        time.sleep(0.005)  # as if the model were larger
        if synced.steps == death_step:
            print(f"{name} dies after {synced.syncs} syncs", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    model.eval()
    center = {key: torch.from_dlpack(value) for key, value in synced.center().items()}
    x = torch.randn(1000, 8)
    values = torch.func.functional_call(model, center, x)
    loss = (values - x.sum(1, keepdim=True)).square().mean()  # 8 for a model of zeros
    print(f"{name}: {synced.syncs} syncs, {members.size} members, loss {loss:.2f}")
    sys.stdout.flush()
    time.sleep(2)  # the others may still receive the last sync
    os._exit(0)  # torchft's threads do not end by themselves


def start(*arguments):
    return subprocess.Popen([sys.executable, __file__, *arguments])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        train(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
    server = LighthouseServer(
        "[::]:0", min_replicas=2, join_timeout_ms=10_000, heartbeat_timeout_ms=2_000
    )
    address = f"http://localhost:{server.address().rpartition(':')[2]}"
    first = start("a", address)
    second = start("b", address)
    start("c", address, str(STEPS // 6)).wait()
    third = start("c", address)
    codes = [first.wait(), second.wait()]
    try:
        third.wait(30)
    except subprocess.TimeoutExpired:  # it came when the others had ended
        third.kill()
    sys.exit(any(codes))
