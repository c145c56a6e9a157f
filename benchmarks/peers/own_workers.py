"""syncalgos doing the work of `benchmarks.peers.scale`, which starts this script.

Each worker has one device. All devices are in one process, or each is in a separate
process, connected by gloo on this host. With "alone:" before the algorithm, the
processes do not communicate: each trains one worker.
"""

import multiprocessing
import sys

import jax

from benchmarks.peers import own, work
from experiments.processes.join import connect
from experiments.processes.network import free_port

ALONE = "alone:"  # before the name of an algorithm
PATIENCE = 60  # seconds for the processes to find each other


def train_devices(task: work.PeerTask) -> None:
    """Trains on as many virtual devices as there are workers."""
    jax.config.update("jax_num_cpu_devices", task.workers)
    work.report_seconds(own.train(task))


def train_process(number: int, task: work.PeerTask, coordinator: str) -> None:
    """Trains one worker in one of several processes; the first process reports."""
    jax.config.update("jax_num_cpu_devices", 1)
    connect(coordinator, number, task.workers, PATIENCE)
    options = {}
    if task.algorithm.startswith(ALONE):
        task = task._replace(algorithm=task.algorithm.removeprefix(ALONE))
        options = {"workers": 1, "devices": jax.local_devices()}
    seconds = own.train(task, slice(number, number + 1), **options)
    if number == 0:
        work.report_seconds(seconds)
    jax.distributed.shutdown()


def train_processes(task: work.PeerTask) -> None:
    """Trains with one process per worker."""
    coordinator = f"127.0.0.1:{free_port()}"
    context = multiprocessing.get_context("spawn")
    worker_processes = [
        context.Process(target=train_process, args=(number, task, coordinator))
        for number in range(task.workers)
    ]
    for process in worker_processes:
        process.start()
    for process in worker_processes:
        process.join()
    exit_codes = [process.exitcode for process in worker_processes]
    if any(exit_codes):
        sys.exit(f"exit codes {exit_codes}")


FORMS = {"devices": train_devices, "processes": train_processes}

if __name__ == "__main__":
    FORMS[sys.argv.pop(1)](work.task())
