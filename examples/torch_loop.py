"""Put a strategy behind a torch optimizer, in two processes of torch and of jax.

    python examples/torch_loop.py

Synced steps a torch optimizer and a strategy; docs/own-loop.md says what it refuses.
"""

import jax
import torch  # pyright: ignore[reportMissingImports]
from jax.sharding import Mesh, NamedSharding

from syncalgos import Replica, Strategy, diloco, stacked


class Synced:  # make one in each process
    def __init__(self, model, optimizer, strategy):
        odd = any(type(x) is not torch.nn.Parameter for x in model.parameters())
        odd = odd or hasattr(model, "no_sync") or strategy.learning_rate is not None
        if odd or strategy.sees_loss or strategy.own_steps:
            raise ValueError("Synced: no DDP, DTensor, learning_rate, own_steps, loss")
        self.optimizer, self.strategy, self.steps = optimizer, strategy, 0
        each = [jax.local_devices(i)[0] for i in range(jax.process_count())]
        self.rows = NamedSharding(mesh := Mesh(each, ["workers"]), jax.P("workers"))
        self.all = stacked(strategy, mesh)
        params = {k: x for k, x in model.named_parameters() if x.requires_grad}
        buffers = {k: x for k, x in model.named_buffers() if x.is_floating_point()}
        self.own = Replica(params, torch.tensor([1.0 * jax.process_index()]), buffers)
        self.state = self.call(lambda params, step: self.all.init(params), params)

    def row(self, x):  # of an array with a row for each process
        x = jax.dlpack.from_dlpack(x.detach().cpu().contiguous())[None]
        return jax.make_array_from_process_local_data(self.rows, x)

    def call(self, function, *own):
        new = function(*jax.tree.map(self.row, own), self.steps)
        return jax.tree.map(lambda x: torch.from_dlpack(x.addressable_data(0))[0], new)

    @torch.no_grad()
    def step(self):
        reduces = self.strategy.reduce is not Strategy().reduce
        if reduces:
            grads = {k: x.grad for k, x in self.own.params.items()}
            new, self.state = self.call(self.all.reduce, grads, self.own, self.state)
            jax.tree.map(torch.Tensor.copy_, grads, new)
        self.optimizer.step()
        if reduces or not self.strategy.acts or self.strategy.acts(self.steps):
            new, self.state = self.call(self.all.sync, self.own, self.state)
            if new.opt_state != self.own.opt_state:  # a number in place of torch's
                raise ValueError("Synced: no strategy that changes opt_state")
            jax.tree.map(torch.Tensor.copy_, self.own, new)
        self.steps += 1

    def center(self):
        new = self.all.center(*jax.tree.map(self.row, (self.own.params, self.state)))
        return {k: torch.from_dlpack(x.addressable_data(0)) for k, x in new.items()}

    def state_dict(self):
        return {"steps": self.steps, "state": jax.tree.leaves(self.state)}

    def load_state_dict(self, saved):
        self.state = jax.tree.structure(self.state).unflatten(saved["state"])
        self.steps = saved["steps"]


def train(number, address):
    jax.config.update("jax_platforms", "cpu")
    jax.distributed.initialize(address, 2, number)
    torch.manual_seed(0)  # all workers start alike
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    synced = Synced(model, optimizer, diloco(20, axis="workers"))
    for x in torch.randn(400, 2, 16, 8)[:, number]:
        optimizer.zero_grad()
        (model(x) - x.sum(1, keepdim=True)).square().mean().backward()
        synced.step()
    print(f"worker {number}: {synced.center()['weight']}")


if __name__ == "__main__":
    torch.multiprocessing.spawn(train, ["127.0.0.1:9997"], 2)
