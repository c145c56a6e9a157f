"""Put a strategy behind a torch optimizer, in two processes of a torch process group.

    python examples/torch_loop.py

TorchGroup lets the group carry a strategy. Synced steps a torch optimizer and a
strategy; docs/own-loop.md says what it refuses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

from syncalgos import Peers, Replica, Strategy, describe, diloco


class TorchGroup:  # a transport; the group's backend is gloo
    def __init__(self, group=None):
        self.group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def all_gather(self, arrays):  # of uint8
        tables = [torch.empty(self.size, len(x), dtype=torch.uint8) for x in arrays]
        for table, x in zip(tables, arrays, strict=True):
            dist.all_gather([*table], torch.from_numpy(x), group=self.group)
        return [table.numpy() for table in tables]

    def all_reduce(self, arrays):  # in place
        for x in arrays:
            if x.dtype.name == "bfloat16":  # which NumPy and torch know by two names
                tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
            else:
                tensor = torch.from_numpy(x)
            dist.all_reduce(tensor, group=self.group)
        return arrays

    def send_receive(self, arrays, to, source):
        tensors = [torch.from_numpy(x) for x in arrays]
        arrived = [torch.empty_like(x) for x in tensors]
        sends = [dist.isend(x, group=self.group, group_dst=to) for x in tensors]
        for x in arrived:
            dist.recv(x, group=self.group, group_src=source)
        for send in sends:
            send.wait()
        return [x.numpy() for x in arrived]


class Synced:  # make one in each process
    def __init__(self, model, optimizer, strategy):
        peers = describe(strategy).axis
        if not isinstance(peers, Peers):
            raise ValueError("Synced: make strategy with axis=Peers(TorchGroup())")
        odd = any(type(x) is not torch.nn.Parameter for x in model.parameters())
        odd = odd or hasattr(model, "no_sync") or strategy.learning_rate is not None
        if odd or strategy.sees_loss or strategy.own_steps:
            raise ValueError("Synced: no DDP, DTensor, learning_rate, own_steps, loss")
        self.peers = peers
        self.optimizer = optimizer
        self.strategy = strategy
        self.steps = 0
        self.reduce = jax.jit(strategy.reduce)
        self.sync = jax.jit(strategy.sync)
        params = {k: x for k, x in model.named_parameters() if x.requires_grad}
        buffers = {k: x for k, x in model.named_buffers() if x.is_floating_point()}
        own_number = torch.tensor([1.0 * peers.rank])  # in place of torch's state
        self.own = Replica(params, own_number, buffers)
        self.state = self.call(strategy.init, params)

    def call(self, function, *trees):
        def to_jax(x):  # a copy, because torch changes its arrays in place
            return jnp.array(jax.dlpack.from_dlpack(x.detach().cpu().contiguous()))

        arrays = [jax.tree.map(to_jax, tree) for tree in trees]
        return jax.tree.map(torch.from_dlpack, self.peers.run(function, *arrays))

    @torch.no_grad()
    def step(self):
        step = torch.tensor(self.steps, dtype=torch.int32)
        reduces = self.strategy.reduce is not Strategy().reduce
        if reduces:
            grads = {k: x.grad for k, x in self.own.params.items()}
            new, self.state = self.call(self.reduce, grads, self.own, self.state, step)
            jax.tree.map(torch.Tensor.copy_, grads, new)
        self.optimizer.step()
        if reduces or not self.strategy.acts or self.strategy.acts(self.steps):
            new, self.state = self.call(self.sync, self.own, self.state, step)
            if new.opt_state != self.own.opt_state:
                raise ValueError("Synced: no strategy that changes opt_state")
            jax.tree.map(torch.Tensor.copy_, self.own, new)
        self.steps += 1

    def center(self):
        return self.call(self.strategy.center, self.own.params, self.state)

    def state_dict(self):
        return {"steps": self.steps, "state": jax.tree.leaves(self.state)}

    def load_state_dict(self, saved):
        self.state = jax.tree.structure(self.state).unflatten(saved["state"])
        self.steps = saved["steps"]


def train(rank, address):
    jax.config.update("jax_platforms", "cpu")
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    torch.manual_seed(0)  # all workers start alike
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    synced = Synced(model, optimizer, diloco(20, axis=Peers(TorchGroup())))
    for x in torch.randn(400, 2, 16, 8)[:, rank]:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        synced.step()
    print(f"worker {rank}: {synced.center()['weight']}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, ["tcp://127.0.0.1:9997"], 2)
