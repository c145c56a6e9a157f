"""Kills runs, which must end as if nothing had been.

After a kill the same command goes on by --resume, or the command of two processes
starts them again by itself.
"""

import os
import signal
import subprocess
import time
from collections import Counter
from itertools import count
from typing import NamedTuple

from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import parse_name, parse_unfinished_name
from support.commands import TIMEOUT
from support.faults import Command, is_halted, until
from support.requirements import parameters
from support.resumed_runs import assert_same_end, format_flags

TASK = (
    "--task support.tiny_tasks:drawing --width 2000 --workers 2 "
    "--optimizer adam --steps 60 "
)
TASK += "--eval-every 7 --checkpoint-every 1"
KINDS = ("in a save", "after a step", "at any moment")
DELAY = 0.06  # seconds in which such a run takes a step or two
MAX_KILL_STEPS = 6  # steps between two kills of a run of 60


class Victim(NamedTuple):
    """A process that is to be killed.

    Attributes:
        command: that makes the run.
        pid: of the process.
        number: of the process, which its checkpoints' parts have too.
        processes: processes.
    """

    command: Command
    pid: int
    number: int = 0
    processes: int = 1

    @property
    def is_over(self):
        """Whether its command has ended."""
        return self.command.process.poll() is not None

    @property
    def is_saving(self):
        """Whether it has begun to write a checkpoint, and not ended."""
        hidden_files = (self.command.run_out / FOLDER).glob(".*")
        return any(
            parse_unfinished_name(x.name) == (self.number, self.processes)
            for x in hidden_files
        )

    def send(self, number=signal.SIGKILL):
        """Sends it a signal; returns whether it was there."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return not self.is_over


def newest(out):
    """The step of the newest checkpoint of which all parts are there."""
    folder = out / FOLDER
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    files = filter(None, map(parse_name, names))
    counts = Counter((file.step, file.num_shards) for file in files)
    complete = [step for (step, number), n in counts.items() if n == number]
    return max(complete, default=0)


def in_training(command, step=40):
    """Waits until all processes of a command have saved a step."""
    until(lambda: newest(command.run_out) >= step, f"step {step}")


def kill_in_a_save(victim):
    """Kills a process that is writing a checkpoint; returns whether it could."""
    while not victim.is_over:
        if victim.is_saving and victim.send(signal.SIGSTOP):
            until(lambda: victim.is_over or is_halted(victim.pid), "it stops")
            if victim.is_saving:
                return victim.send()
            victim.send(signal.SIGCONT)
    return False


def kill_later(victim, seconds):
    """Kills a process after some time; returns whether it was there."""
    try:
        victim.command.process.wait(seconds)
    except subprocess.TimeoutExpired:
        return victim.send()
    return False


def strike(victim, kind, draw, seconds):
    """Kills a process at a moment that is drawn; returns whether it was in time.

    Args:
        victim: the process.
        kind: one of KINDS.
        draw: of the moment.
        seconds: that a run takes which nothing befalls.
    """
    if kind == "at any moment":
        return kill_later(victim, draw.uniform(0, seconds))
    step = newest(victim.command.run_out) + draw.randint(1, MAX_KILL_STEPS)
    until(lambda: victim.is_over or newest(victim.command.run_out) >= step, "a step")
    if kind == "after a step":
        return kill_later(victim, draw.uniform(0, DELAY))
    return kill_in_a_save(victim)


def killed_and_resumed(start, words, folder, kinds, draw, seconds):
    """Yields runs of one process that were killed and went on, until all kills hit."""
    kinds_left = list(kinds)
    for number in count():
        if not kinds_left:
            return
        out = folder / f"alone-{number}"
        while kinds_left:
            command = start(f"{words} --resume", out, devices=2)
            in_time = strike(Victim(command, command.pid), kinds_left[0], draw, seconds)
            if command.process.wait(TIMEOUT) != -signal.SIGKILL or not in_time:
                break
            kinds_left.pop(0)
        yield start(f"{words} --resume", out, devices=2).ended()


def killed_and_restarted(start, words, folder, kinds, draw, seconds):
    """Yields runs of two processes one of which is killed, until all kills hit."""
    kinds_left = list(kinds)
    for number in count():
        if not kinds_left:
            return
        out = folder / f"together-{number}"
        command = start(f"{words} --processes 2 --max-restarts 1", out)
        which = draw.randrange(2)
        strike(
            Victim(command, command.member(which), which, 2),
            kinds_left[0],
            draw,
            seconds,
        )
        ended = command.ended()
        if "restart 1 of 1" in ended.stderr:
            kinds_left.pop(0)
        yield ended


def attack(start, name, folder, alone, together, draw):
    """Kills runs by an algorithm; asserts that all end as one that nothing befalls.

    Args:
        start: of faults.commands.
        name: of the algorithm.
        folder: for the runs.
        alone: kinds of the kills of a run of one process.
        together: kinds of the kills of one of two processes.
        draw: of the moments.
    """
    words = f"{TASK} {format_flags(name, parameters(name))}"
    start_time = time.monotonic()
    uninterrupted = start(words, folder / "whole", devices=2).ended()
    arguments = (draw, time.monotonic() - start_time)
    for ended in killed_and_resumed(start, words, folder, alone, *arguments):
        assert_same_end(ended, uninterrupted)
    if together:  # sums are rounded in another order by one process of two devices
        uninterrupted = start(
            f"{words} --processes 2", folder / "whole-together"
        ).ended()
    for ended in killed_and_restarted(start, words, folder, together, *arguments):
        assert_same_end(ended, uninterrupted)


def kept_programs(folder):
    """The environment in which restarts find the programs that were compiled before.

    They are a user's: compiled without optimization, one process rounds otherwise than
    two.
    """
    return {
        "XLA_FLAGS": None,
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": folder,
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": -1,
    }
