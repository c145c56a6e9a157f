"""Saving a run as it goes, and going on from there."""

import dataclasses
import errno
import hashlib
import json
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.checkpoint import folder as checkpoints
from experiments.checkpoint import state_arrays
from experiments.checkpoint.folder import COMMON, Incomplete
from experiments.checkpoint.shard_file import Damaged, Shard, write
from experiments.cli import factories, terminal
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM
from experiments.training import records
from experiments.training.config import SETTINGS
from experiments.training.loop import bytes_after
from experiments.training.prepared import PreparedRun, versions
from experiments.training.process_group import ProcessGroup
from experiments.training.records import Progress
from syncalgos import TrainState

FOLDER = "checkpoints"  # in --out
FULL = 1  # the rank of a disk without room: older checkpoints may make some


class CheckpointManager(NamedTuple):
    """Where a run saves itself.

    Attributes:
        run: what is saved.
        folder: for its checkpoints.
        started: time.perf_counter() at the start of the process.
    """

    run: PreparedRun
    folder: Path
    started: float

    def save(self, state: TrainState, progress: Progress) -> None:
        """Writes this process's part of a checkpoint, and removes old ones.

        A disk that is full costs older ones, but for one; if that does not help, or it
        may not be written to, it costs the checkpoint, not the run.
        """
        group = self.run.group
        group.announce("save", progress.step)
        part = self._part(state, progress)
        failure = self._write(part)
        while (worst := group.largest(_rank(failure))) == FULL:
            if not self._made_room(progress):
                break
            failure = failure and self._write(part)
        if failure:
            group.note(
                f"no checkpoint of step {progress.step}: {self.folder}: "
                f"{failure.strerror or failure}; the run goes on"
            )
        with suppress(OSError):
            if not worst:
                progress.saved = progress.step
                self.prune(progress.step)
            elif not failure:  # nobody can use it
                own = group.process, group.processes
                checkpoints.remove(self.folder, progress.step, *own)

    def _part(self, state: TrainState, progress: Progress) -> Shard:
        """Returns what it takes to go on, as this process holds it."""
        trainer = self.run.trainer
        center = trainer.center(state)
        held = trainer.to_host(state)
        return Shard(
            step=progress.step,
            workers=trainer.workers,
            first=trainer.layout.own_workers.start,
            own=state_arrays.own(held),
            shared=state_arrays.shared(held, center),
            record=self._record(progress),
        )

    def _write(self, part: Shard) -> OSError | None:
        """Writes a part; returns why it could not."""
        group = self.run.group
        try:
            write(self.folder, part, group.process, group.processes)
        except OSError as error:
            return error
        return None

    def _made_room(self, progress: Progress) -> bool:
        """Removes the oldest checkpoint that is older than one which all have."""
        group, saved = self.run.group, progress.saved
        own = group.process, group.processes
        older = [x for x in checkpoints.steps(self.folder) if x < saved]
        oldest = group.smallest(min(older, default=saved))
        lacking = not checkpoints.is_there(self.folder, saved, *own)
        if group.largest(lacking) or oldest == saved:
            return False
        failed = False
        try:
            checkpoints.remove(self.folder, oldest, *own)
        except OSError:
            failed = True
        if group.largest(failed):
            return False
        if group.is_first:
            group.note(
                f"no room for the checkpoint of step {progress.step}: that of step "
                f"{oldest} is removed"
            )
        return True

    def prune(self, newest: int) -> None:
        """Removes this process's part of checkpoints that are old, or newer than this.

        Raises:
            OSError: it cannot.
        """
        group, keep = self.run.group, self.run.config.keep_checkpoints
        keep = keep if newest else 0  # of another run
        checkpoints.prune(self.folder, keep, group.process, group.processes, newest)

    def _record(self, progress: Progress) -> dict[str, Any]:
        spent = progress.earlier_seconds + time.perf_counter() - self.started
        now = dataclasses.replace(progress, earlier_seconds=spent)
        sent = self.run.count(progress)
        return records.plain(
            {
                "run_id": progress.run_id,
                "settings": _compared(self.run),
                "versions": versions(),
                "sent": bytes_after(sent, progress),
                "progress": dataclasses.asdict(now),
            }
        )

    def resumed(self) -> tuple[PreparedRun, Progress]:
        """Returns the run where it goes on, if it is asked to, and its progress.

        Raises:
            BadRequest: the folder holds a checkpoint, or a config, of another run.
        """
        run, progress = self.run, Progress()
        if run.config.resume and (found := self.restore()) is not None:
            state, progress = found
            run = dataclasses.replace(run, state=state)
            terminal.say(f"going on from the checkpoint of step {progress.step}")
        elif run.config.resume:
            out = self.folder.parent
            if run.group.is_first:
                check_config(out, run)
            terminal.say(f"no checkpoint in {out}: the run starts from the beginning")
        return run, identified(progress, run.group)

    def restore(self) -> tuple[TrainState, Progress] | None:
        """The newest checkpoint that all processes can use; None if there is none.

        Raises:
            BadRequest: it is of another run, or of another number of workers.
        """
        group, before = self.run.group, None
        while (step := group.smallest(self._newest(before))) >= 0:
            if (part := self._agreed(step)) is not None:
                return self._restored(part)
            before = step
        return None

    def _agreed(self, step: int) -> Shard | None:
        """This process's part of a checkpoint, if all have theirs, and of one run."""
        group, part = self.run.group, None
        try:
            part = self._read(step)
        except (Damaged, Incomplete, OSError) as error:
            group.note(f"the checkpoint of step {step} cannot be used: {error}")
        if group.largest(part is None) or part is None:
            return None
        runs = group.gather(_fingerprint(part))
        if (runs == runs[0]).all():
            return part
        if group.is_first:
            group.note(
                f"the checkpoint of step {step} cannot be used: its parts are of "
                "several runs"
            )
        return None

    def _newest(self, before: int | None) -> int:
        """The newest step in the folder that is before another; -1 if there is none."""
        found = checkpoints.steps(self.folder)
        return max((x for x in found if before is None or x < before), default=-1)

    def _read(self, step: int) -> Shard:
        """This process's workers; one worker of a run with another number of them."""
        trainer = self.run.trainer
        rows, workers = trainer.layout.own_workers, trainer.workers
        try:
            part = checkpoints.load(self.folder, step, rows.start, len(rows))
        except Incomplete:
            part = checkpoints.load(self.folder, step, 0, 1)
            if part.workers == workers:
                raise
        same = part.workers == workers
        return part if same else checkpoints.load(self.folder, step, 0, 1)

    def _restored(self, part: Shard) -> tuple[TrainState, Progress]:
        run, c = self.run, self.run.config
        progress = Progress(**part.record["progress"])
        same = part.workers == run.trainer.workers
        if not same and not c.resume_center:
            raise BadRequest(
                f"--resume: the checkpoint of step {part.step} is of {part.workers} "
                f"workers, not {run.trainer.workers}: --resume-center starts new "
                "replicas from its center model"
            )
        if part.step > c.steps:
            raise BadRequest(
                f"--resume: the checkpoint is of step {part.step}, behind --steps "
                f"{c.steps}"
            )
        _check_settings(part.record["settings"], run, same)
        if part.record["versions"] != versions() and run.group.is_first:
            terminal.say("the checkpoint is of other versions: numbers may differ")
        named = (part.own, part.shared)
        try:
            if same:
                state = state_arrays.state(run.trainer, run.state, *named)
            else:
                state = state_arrays.restarted(run.trainer, c.seed, run.state, *named)
        except state_arrays.Misfit as error:
            raise BadRequest(f"--resume: {error}") from error
        if not same:
            progress.sent_before, progress.sent_since = part.record["sent"], part.step
            progress.run_id = ""
        progress.saved = part.step
        progress.resumed_at.append(part.step)
        return state, progress


def identified(progress: Progress, group: ProcessGroup) -> Progress:
    """The progress of a run that has an id, the same in all processes."""
    drawn = group.gather([secrets.randbits(31) for _ in range(4)])[0]
    run_id = progress.run_id or "".join(f"{int(x):08x}" for x in drawn)
    return dataclasses.replace(progress, run_id=run_id)


def _fingerprint(part: Shard) -> np.ndarray:
    """Numbers below 2³¹ that tell runs apart."""
    common = [part.workers, *(part.record.get(x) for x in COMMON)]
    text = json.dumps(common, sort_keys=True)
    digest = hashlib.sha256(text.encode()).digest()
    return (np.frombuffer(digest, ">u4") >> 1).astype(np.int64)


def _rank(failure: OSError | None) -> int:
    """How bad it is that a part could not be written."""
    if failure is None:
        return 0
    return FULL if failure.errno in (errno.ENOSPC, errno.EDQUOT) else FULL + 1


def _compared(run: PreparedRun) -> dict[str, Any]:
    """Returns what the numbers of a run depend on, by flag."""
    return run.config.values("run")


def check_config(out: Path, run: PreparedRun) -> None:
    """Raises a BadRequest if a folder's config.json, if there is one, is of another."""
    try:
        config = records.read_json(out / "config.json")
        own = {**config["arguments"], **config["task_arguments"]}
        before = {**config["settings"], **own}
    except (OSError, ValueError, KeyError):  # none, or half of one
        return
    free = {name for name, setting in SETTINGS.items() if setting.scope != "run"}
    _check_settings({k: x for k, x in before.items() if k not in free}, run, same=True)


def _check_settings(before: dict[str, Any], run: PreparedRun, same: bool) -> None:
    """Raises a BadRequest if what was begun is of another run.

    Args:
        before: its `_settings`, as JSON has them.
        run: what shall go on.
        same: whether both have as many workers.
    """
    now = records.plain(_compared(run))
    # A run that was begun before an algorithm had a parameter had its default.
    before = factories.defaults(ALGORITHM, run.config.algo) | before
    free = set() if same else {"workers", "batch_size", "accumulate"}
    if now["schedule"] == "constant":  # a longer run begins as a shorter one does
        free.add("steps")
    # A task and an algorithm bring settings of their own.
    names = sorted({*now, *before} - free, key=lambda x: (x not in ("task", "algo"), x))
    for name in names:
        if now.get(name) != before.get(name):
            flag = f"--{name.replace('_', '-')}"
            raise BadRequest(
                f"--resume: the run was made with {flag} {before.get(name)}, not "
                f"{now.get(name)}"
            )
