"""A transport of Peers whose processes come and go: the manager of torchft.

    members = join("a", "http://lighthouse:29510")
    synced = Synced(model, optimizer, members, syncalgos.diloco(20, axis=members.peers))

docs/torchft.md explains it, and examples/torchft_loop.py trains with it.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import torchft  # pyright: ignore[reportMissingImports]

import syncalgos
from syncalgos import Replica, Strategy


class Members:
    """The processes of the manager's quorum, which is another one at each attempt.

    Attributes:
        manager: a torchft.Manager with `use_async_quorum=False`.
        peers: the axis for strategies.
        rank: this process's number in the quorum.
        size: the number of processes in the quorum.
    """

    def __init__(self, manager: Any, store: Any = None) -> None:
        self.manager = manager
        self.store = store  # serves as long as something refers to it
        self.rank = 0
        self.size = 1  # until the first quorum
        self.peers = syncalgos.Peers(self)

    def all_reduce(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Adds up arrays; raises an error if a process was lost meanwhile."""
        sums = []
        for array in arrays:
            # torch has no view of NumPy's bfloat16, and short floats are sent wide.
            tensor = torch.from_numpy(array.astype(np.result_type(array, np.float32)))
            self.manager.allreduce(
                tensor, reduce_op=torch.distributed.ReduceOp.SUM
            ).wait()
            if self.manager.errored():
                raise ConnectionError("a process was lost, or waits elsewhere")
            sums.append(tensor.numpy().astype(array.dtype))
        return sums

    def all_gather(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        raise NotImplementedError("torchft's manager only adds up")

    def attempt(
        self, function: Callable[..., Any], get_arguments: Callable[[], Any]
    ) -> Any:
        """Calls a strategy's function once, among the processes that are there.

        Args:
            function: sync or reduce of a strategy over `peers`.
            get_arguments: returns its arguments, after this process may have taken the
                state of another one.

        Returns:
            The result; None if the call is dropped, because a process was lost in it.
        """
        self.manager.start_quorum()  # waits for the least number of processes
        self.rank = self.manager.participating_rank() or 0
        self.size = self.manager.num_participants()
        result = None
        if not self.manager.errored():
            try:
                # Traced again for each rank and size.
                result = self.peers.run(jax.jit(function), *get_arguments())
            except syncalgos.TransportError as error:
                if isinstance(error.__cause__, NotImplementedError):
                    raise
                self.manager.report_error(error)
        return result if self.manager.should_commit() else None


def join(
    name: str,
    lighthouse: str,
    least: int = 2,
    seconds: float = 10,
    host: str = "localhost",
) -> Members:
    """Makes this process one of the members; call it once in each process.

    Args:
        name: this process's name, another one in each.
        lighthouse: the address of torchft's lighthouse, http://HOST:PORT.
        least: the number of members below which all wait.
        seconds: how long a member waits for the others in a sync.
        host: this machine's address, at which the others reach it.
    """
    store = torch.distributed.TCPStore(host, 0, is_master=True, wait_for_workers=False)
    timeout = timedelta(seconds=seconds)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timeout),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=least,
        use_async_quorum=False,
        init_sync=False,  # all start from the same seed
        timeout=timeout,
        quorum_timeout=timedelta(minutes=10),
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        hostname=host,
        lighthouse_addr=lighthouse,
        replica_id=name,
    )
    return Members(manager, store)


class Synced:
    """A torch model and optimizer behind a strategy over the members."""

    def __init__(
        self, model: Any, optimizer: Any, members: Members, strategy: Strategy
    ) -> None:
        has_reduce = strategy.reduce is not Strategy().reduce
        has_sync = strategy.sync is not Strategy().sync
        if has_reduce == has_sync:
            raise ValueError("Synced: a strategy of either gradients or params")
        if strategy.sees_loss or strategy.own_steps or strategy.learning_rate:
            raise ValueError("Synced: a strategy without learning_rate, steps and loss")
        if syncalgos.describe(strategy).axis is not members.peers:
            raise ValueError("Synced: pass axis=members.peers to the strategy")
        self.model = model
        self.optimizer = optimizer
        self.members = members
        self.strategy = strategy
        self.has_reduce = has_reduce
        self.params = dict(model.named_parameters())
        self.buffers = {k: x for k, x in model.named_buffers() if x.is_floating_point()}
        self.steps = 0
        self.syncs = 0
        check_means(strategy, self.arrays(self.params))
        self.state = strategy.init(self.arrays(self.params))
        members.manager.register_state_dict_fn(
            "synced", self.load_state_dict, self.state_dict
        )

    def arrays(self, tensors: dict[str, Any]) -> dict[str, jax.Array]:
        return {k: jnp.array(x.detach().cpu().numpy()) for k, x in tensors.items()}

    def replica(self) -> Replica:
        return Replica(self.arrays(self.params), (), self.arrays(self.buffers))

    def grads(self) -> dict[str, Any]:
        return {k: x.grad for k, x in self.params.items()}

    def step(self) -> None:
        """Takes a local step, and syncs where the strategy does."""
        if self.has_reduce:
            grads = self.repeat(
                self.strategy.reduce,
                lambda: (self.arrays(self.grads()), self.replica()),
            )
            self.copy(self.grads(), grads)
        self.optimizer.step()
        acts = self.strategy.acts
        if not self.has_reduce and (acts is None or acts(self.steps)):
            replica = self.repeat(self.strategy.sync, lambda: (self.replica(),))
            self.copy(self.params, replica.params)
            self.copy(self.buffers, replica.buffers)
        self.steps += 1

    def repeat(
        self, function: Callable[..., Any], get_arrays: Callable[[], tuple[Any, ...]]
    ) -> Any:
        """Calls a function until all who are there have its result."""
        result = None
        while result is None:  # a call that failed has changed nothing
            result = self.members.attempt(
                function, lambda: (*get_arrays(), self.state, jnp.int32(self.steps))
            )
        value, self.state = result
        self.syncs += 1
        return value

    @torch.no_grad()
    def copy(self, tensors: dict[str, Any], arrays: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_dlpack(arrays[name]))

    def center(self) -> dict[str, jax.Array]:
        """Returns the model to evaluate, right after a sync."""
        params = self.arrays(self.params)
        center = self.strategy.center
        if not isinstance(center, syncalgos.MeanCenter):
            return center(params, self.state)
        if center.over is None:
            return params  # on which all members agree then
        return center.over(params, params, self.state)

    def state_dict(self) -> dict[str, Any]:
        """Returns what a process that joins takes from another one."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "grads": self.grads() if self.has_reduce else {},
            "state": [torch.from_dlpack(x) for x in jax.tree.leaves(self.state)],
            "counts": (self.steps, self.syncs),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.has_reduce:
            self.copy(self.grads(), saved["grads"])
        leaves = [jnp.array(x.numpy()) for x in saved["state"]]
        self.state = jax.tree.structure(self.state).unflatten(leaves)
        self.steps, self.syncs = saved["counts"]


def check_means(strategy: syncalgos.Strategy, params: Any) -> None:
    """Refuses a strategy that does more than add up, in one line."""
    traffic = syncalgos.communication(strategy, params, workers=4, steps=2**14)
    unsupported = sorted({*traffic.by_collective} - {"all_reduce"})
    if unsupported:
        raise ValueError(
            f"torchft's manager only adds up, but this strategy needs {unsupported}: "
            "choose one of means, such as model_averaging, bmuf, slowmo or diloco"
        )
