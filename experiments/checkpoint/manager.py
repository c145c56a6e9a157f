"""Saves a run as it goes, and restores it."""

import dataclasses
import hashlib
import json
import secrets
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from experiments.checkpoint import folder as checkpoints
from experiments.checkpoint import record, same_run, state_arrays
from experiments.checkpoint.background import Background
from experiments.checkpoint.folder import Incomplete, identity
from experiments.checkpoint.record import Record
from experiments.checkpoint.shard_file import Damaged, Shard, write
from experiments.cli import terminal
from experiments.cli.errors import BadRequest, MayPass
from experiments.training import records
from experiments.training.loop import bytes_after
from experiments.training.records import Line, Progress
from experiments.training.run import Run
from experiments.training.versions import versions
from syncalgos import TrainState
from syncalgos.combinators import decided

FOLDER = "checkpoints"  # in --out

# What may keep a run from beginning in a folder whose checkpoints do not serve.
USELESS, UNREAD = 1, 2
# A second attempt to read would meet these again.
LASTING = PermissionError, IsADirectoryError, NotADirectoryError


class Saver(NamedTuple):
    """Saves one run as it goes.

    Attributes:
        run: the run to save.
        folder: the folder for its checkpoints.
        started: time.perf_counter() at the start of the process.
        background: writes while the run goes on; to be waited for at its end.
        run_ids: of the run, and of the one that it goes on with: their checkpoints may
            be removed when they are old.
        start_id: drawn at random at this start: shards of two are never combined.
    """

    run: Run
    folder: Path
    started: float
    background: Background
    run_ids: Collection[str | None]
    start_id: str

    @property
    def _place(self) -> tuple[int, int]:
        """The number of this process's shards, and how many a checkpoint has."""
        return self.run.group.process, self.run.group.processes

    def save(self, state: TrainState, progress: Progress, last: bool) -> None:
        """Writes this process's shard of a checkpoint, and removes old ones.

        If it cannot be written, such as on a full disk, a line reports that; the run
        continues, and older checkpoints stay. A single process writes a copy of its
        state in the background; the last checkpoint is waited for.
        """
        # Each process writes its own workers: to send them to the first would take
        # longer, on a slow link, than the rounds between two checkpoints.
        if not progress.step:  # there is nothing to keep
            return
        self.background.wait()  # one state is held beside the run's, not many
        self.run.group.announce("save", progress.step)
        store = partial(self._store, self._shard(state, progress), progress)
        if self.run.group.processes == 1:
            self.background.start(store)
        else:  # they agree on the outcome, which takes all their main threads
            store()
        if last:  # nothing trains beside it, and a further signal would end it
            self.background.wait()

    def _store(self, shard: Shard, progress: Progress) -> None:
        """Writes a shard, and removes old ones; notes in `progress` what is whole."""
        group, failure = self.run.group, None
        try:
            write(self.folder, shard, *self._place)
        except OSError as error:
            failure = error
            group.note(
                f"no checkpoint of step {shard.step}: {self.folder}: "
                f"{error.strerror or error}; the run continues"
            )
        is_whole = not group.largest(failure is not None)
        with suppress(OSError):
            if is_whole:
                progress.saved = shard.step
                self.prune(shard.step, progress.lines)
            elif failure is None:  # without the other shards nobody can use it
                step = [shard.step]
                checkpoints.remove(self.folder, step, *self._place, self.run_ids)

    def _shard(self, state: TrainState, progress: Progress) -> Shard:
        """Returns this process's part of everything needed to resume."""
        trainer, run = self.run.trainer, self.run
        # The center goes in too, for --resume-center with another number of workers.
        center = trainer.center(state)
        # The devices' own memory, which arrays on a CPU may be, goes to the next steps.
        held = jax.tree.map(state_arrays.owned, trainer.to_host(state))
        spent = progress.earlier_seconds + time.perf_counter() - self.started
        kept = Record(
            progress=dataclasses.replace(progress, earlier_seconds=spent),
            settings=run.config.values("run"),
            versions=versions(),
            sent=bytes_after(run.rounds.sent(progress), progress),
            run_id=progress.run_id,
            start_id=self.start_id,
            data=run.data.sha256,
        )
        return Shard(
            step=progress.step,
            workers=trainer.workers,
            first=trainer.layout.own_workers.start,
            own=state_arrays.own(held),
            shared=state_arrays.shared(held, center),
            record=records.plain(vars(kept) | {"progress": vars(kept.progress)}),
        )

    def prune(self, newest: int, lines: Iterable[Line]) -> None:
        """Removes this process's shards that are old, and that the run has written.

        Args:
            newest: the step of the newest checkpoint.
            lines: the evaluations so far.

        Raises:
            OSError: it cannot.
        """
        c, best = self.run.config, None
        if c.keep == "best":
            there = {*checkpoints.steps(self.folder)}
            best = records.best(x for x in lines if x["step"] in there)
        old = c.keep_checkpoints, *self._place, newest, self.run_ids
        checkpoints.prune(self.folder, *old, best["step"] if best else None)

    def open(self, newest: int, lines: Iterable[Line]) -> None:
        """Removes the checkpoints that the run replaces, or old ones.

        Raises:
            OSError: it cannot.
        """
        if self.run.config.overwrite:
            checkpoints.prune(self.folder, 0, *self._place)
        else:
            self.prune(newest, lines)


class Checkpoints(NamedTuple):
    """The checkpoints that a run may go on from.

    Attributes:
        run: that can start.
        folder: of its checkpoints.
    """

    run: Run
    folder: Path

    def newest(self) -> Shard | None:
        """Returns the newest shard whose checkpoint all processes can use.

        Returns:
            None if there are no checkpoints.

        Raises:
            BadRequest: there are, and none of them can be used; MayPass if a file could
                not be read for now.
        """
        step = 2**31
        there: list[int] = []
        problems: list[Exception] = []
        try:
            there = checkpoints.steps(self.folder)
        except OSError as error:
            problems.append(error)
        while step >= 0:
            # A host may lack the newest: they agree on one that all of them have.
            older = (x for x in there if x < step)
            step = self.run.group.smallest(max(older, default=-1))
            shard = self._agreed(step, problems) if step >= 0 else None
            if shard is not None:
                return shard
        self._check_begins(there, problems)

    def _check_begins(self, there: list[int], problems: list[Exception]) -> None:
        """Raises a BadRequest if a run from the beginning would replace checkpoints.

        Args:
            there: steps of those in this process's folder.
            problems: why they could not be used.
        """
        is_unread = any(
            isinstance(x, OSError) and not isinstance(x, LASTING) for x in problems
        )
        is_useless = any(not isinstance(x, Incomplete) for x in problems)
        # A first save that was cut short has lost nothing: the next one replaces it.
        is_useless |= bool(there) and not checkpoints.is_first_save(self.folder)
        here = UNREAD if is_unread else USELESS if is_useless else 0
        worst = self.run.group.largest(here)
        reason = problems[0] if problems else "another process cannot use its part"
        told = f"--resume: no checkpoint in {self.folder} can be used: {reason}; "
        if worst == UNREAD:
            raise MayPass(f"{told}nothing is removed: the same command tries again")
        if worst == USELESS:
            raise BadRequest(f"{told}nothing is removed: --overwrite begins anew")

    def _agreed(self, step: int, problems: list[Exception]) -> Shard | None:
        """Returns this process's shard, if all processes have theirs of one run."""
        run, group, shard = self.run, self.run.group, None
        try:
            shard = state_arrays.serving(run.trainer, run.state, self._read(step))
        except (Damaged, Incomplete, OSError) as error:
            problems.append(error)
            group.note(f"the checkpoint of step {step} cannot be used: {error}")
        if group.largest(shard is None) or shard is None:
            return None
        # Numbers below 2³¹, which processes can exchange, that tell runs apart.
        text = json.dumps(identity(shard), sort_keys=True).encode()
        digest = np.frombuffer(hashlib.sha256(text).digest(), ">u4") >> 1
        runs = group.gather(digest.astype(np.int64))
        if (runs == runs[0]).all():
            return shard
        problems.append(Damaged("its parts are of several runs"))
        if group.is_first:
            group.note(f"the checkpoint of step {step} cannot be used: {problems[-1]}")
        return None

    def _read(self, step: int) -> Shard:
        """Loads this process's workers; one, if the checkpoint has another number."""
        trainer = self.run.trainer
        rows, workers = trainer.layout.own_workers, trainer.workers
        load = partial(checkpoints.load, self.folder, step, check=_record_of)
        try:
            shard = load(rows.start, len(rows))
            if shard.workers == workers:
                return shard
        except Incomplete:
            if load(0, 1).workers == workers:
                raise
        return load(0, 1)

    def restored(self, shard: Shard) -> tuple[Run, Progress]:
        """Returns the run with a checkpoint's state, and the progress until then."""
        run, c, trainer = self.run, self.run.config, self.run.trainer
        found = _record_of(shard)
        progress = found.progress
        same = shard.workers == trainer.workers
        told = f"--resume: the checkpoint of step {shard.step}"
        if not same and not c.resume_center:
            raise BadRequest(
                f"{told} is of {shard.workers} workers, not {trainer.workers}: "
                "--resume-center starts new replicas from its center model"
            )
        if shard.step > c.steps:
            raise BadRequest(f"{told} is behind --steps {c.steps}")
        same_run.check_settings(found.settings, c, same)
        if found.data and found.data != run.data.sha256:
            raise BadRequest(f"{told} is of other data: the files have changed")
        decisions = len(decided.found(run.state.sync))
        if any(number >= decisions for _, number in progress.decided):
            raise BadRequest(f"{told} has decisions that {c.algo} does not take")
        if found.versions != versions() and run.group.is_first:
            terminal.say("other versions wrote the checkpoint: numbers may differ")
        arrays = run.state, shard.own, shard.shared
        try:
            if same:
                state = state_arrays.state(trainer, *arrays)
            else:
                state = state_arrays.restarted(trainer, c.seed, *arrays)
        except state_arrays.Misfit as error:
            raise BadRequest(f"--resume: {error}") from error
        if not same:
            progress.sent_before, progress.sent_since = found.sent, shard.step
            progress.run_id = ""
        progress.saved = shard.step
        progress.resumed_at.append(shard.step)
        return dataclasses.replace(run, state=state), progress


def _record_of(shard: Shard) -> Record:
    """Returns the record of a shard; raises a ValueError if it is not as written."""
    return record.read(shard.record, shard.step)


def restore(
    run: Run, folder: Path, started: float, background: Background
) -> tuple[Saver, Progress]:
    """Returns what saves a run, which goes on if asked to, and its progress so far.

    Args:
        run: that can start.
        folder: for its checkpoints.
        started: as `Saver` has it, and background.

    Raises:
        BadRequest: the folder holds a checkpoint, or a config, of another run, or
            checkpoints none of which can be used.
    """
    group, out, progress = run.group, folder.parent, Progress()
    found = Checkpoints(run, folder)
    drawn = group.gather([secrets.randbits(31) for _ in range(4)])[0]
    start_id = "".join(f"{int(x):08x}" for x in drawn)
    run_ids: list[str | None] = []
    shard = None
    if run.config.resume:
        shard = found.newest()
    if shard is not None:
        run, progress = found.restored(shard)
        run_ids.append(shard.record.get("run_id"))
        terminal.say(f"going on from the checkpoint of step {progress.step}")
    elif run.config.resume:
        if group.is_first:
            same_run.check_config(out, run.config)
        terminal.say(f"no checkpoint in {out}: the run starts from the beginning")
    elif not run.config.overwrite:
        try:
            is_used = bool(checkpoints.steps(folder))
        except OSError:
            is_used = True  # they cannot be listed, and are not to be replaced
        if group.largest(is_used):
            raise BadRequest(
                f"--out {out} already holds checkpoints: take another folder, "
                "--resume to go on from them, or --overwrite"
            )
    progress.run_id = progress.run_id or start_id
    run_ids.append(progress.run_id)
    return Saver(run, folder, started, background, run_ids, start_id), progress
