# pyright: reportMissingImports=false
"""Runs one process for each worker of a file."""

import multiprocessing
import os
import socket
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np

TIMEOUT = 90.0  # seconds
TRACE = "CONFORMANCE_TRACE"  # set: workers print what they have to say


class WorkerError(RuntimeError):
    """The error of a worker: its kind, and its first line."""


def find_port() -> int:
    """Returns a port that is free now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def in_processes(
    worker: Callable[..., list[np.ndarray]], *args: Any, has_group: bool = True
) -> Callable[[dict[str, Any]], np.ndarray]:
    """Returns a row's `run`, which starts a process for each worker.

    Args:
        worker: called in each with its number, the content of the file, `args` and, if
            there is no group, a free port; returns its params after each step.
        args: further arguments.
        has_group: whether torch's default process group, gloo, is set up before.
    """

    def run(vectors: dict[str, Any]) -> np.ndarray:
        port = find_port()
        more_args = args if has_group else (*args, port)
        call = partial(call_worker, worker, vectors, more_args, port, has_group)
        results = run_all(call, vectors["workers"])
        return np.array(results).swapaxes(0, 1)

    return run


def run_all(call: Callable[[int, Connection], None], workers: int) -> list[Any]:
    """Calls a function in a forked process for each worker; returns what they send.

    Raises:
        WorkerError: a worker raised an error, or sent nothing in time.
    """
    forked = multiprocessing.get_context("fork")  # importing a framework takes long
    pipes = [forked.Pipe(duplex=False) for _ in range(workers)]
    processes = [
        forked.Process(target=call, args=(worker, sender))
        for worker, (_, sender) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    waiting: dict[Any, int] = {
        receiver: worker for worker, (receiver, _) in enumerate(pipes)
    }
    results = {}
    error = ""
    try:
        while waiting and not error:
            ready: list[Any] = wait(list(waiting), TIMEOUT)
            if not ready:
                error = f"no result from {len(waiting)} workers in {TIMEOUT:g} s"
            for receiver in ready:
                number = waiting.pop(receiver)
                results[number], error = receiver.recv()
                if error:
                    break
    finally:
        for process in processes:
            process.join(0 if error else 5)
            process.kill()
    if error:
        raise WorkerError(error)
    return [results[worker] for worker in range(workers)]


def call_worker(
    worker: Callable[..., Any],
    vectors: dict[str, Any],
    args: tuple,
    port: int,
    has_group: bool,
    number: int,
    sender: Connection,
) -> None:
    """Sends (the result of a worker, "") or (None, the last line of its error)."""
    warnings.simplefilter("ignore")
    is_traced = TRACE in os.environ
    if not is_traced:
        silence()
    result = None
    error = ""
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        workers = str(vectors["workers"])
        os.environ.update(
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            RANK=str(number),
            WORLD_SIZE=workers,
            LOCAL_RANK=str(number),
            LOCAL_WORLD_SIZE=workers,
        )
        if has_group:
            size = vectors["workers"]
            dist.init_process_group("gloo", rank=number, world_size=size)
        result = worker(number, vectors, *args)
        if has_group:
            dist.barrier()
    except BaseException as raised:
        if is_traced:
            traceback.print_exc()
        lines = str(raised).strip().splitlines() or [""]
        error = f"{type(raised).__name__}: {lines[0]}"
    sender.send((result, error))


def silence() -> None:
    """Drops what this process prints, from libraries in other languages too."""
    with open(os.devnull, "w") as nothing:
        for descriptor in (1, 2):
            os.dup2(nothing.fileno(), descriptor)
