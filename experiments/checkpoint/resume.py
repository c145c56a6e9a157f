"""Resuming: the content and the time of a save, and whether a run may continue."""

import dataclasses
import secrets
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax

from experiments import files
from experiments.checkpoint import shards, state_arrays
from experiments.checkpoint.shards import DamagedShard, Incomplete, Shard, join_pieces
from experiments.command import factories, terminal
from experiments.command.errors import BadRequest, MayPass, may_pass
from experiments.command.factories import ALGORITHM, TASK
from experiments.command.words import RENAMED
from experiments.training import run_folder
from experiments.training.config import SETTINGS, RunConfig
from experiments.training.machine import versions
from experiments.training.prepare import Run
from experiments.training.progress import Progress, find_best
from experiments.training.rounds import count_decisions
from syncalgos import DataParallel, HeldPart, TrainState

FOLDER = "checkpoints"  # in --out
NUM_KEPT = 3  # the newest checkpoints that a run keeps
# Flags of 0.3 that are gone; no numbers depended on them.
REMOVED_FLAGS = {
    "feed",
    "keep_checkpoints",
    "lane_form",
    "lanes",
    "scheduler",
    "sync_memory",
}


class Finished(BadRequest):
    """A run to resume that is done, without a checkpoint of its end.

    Attributes:
        summary: the content of its summary.json; {} in other processes than the first.
    """

    def __init__(self, out: Path, summary: dict[str, Any]):
        super().__init__(
            f"the run in {out} is finished, and has no checkpoint: its files stay"
        )
        self.summary = summary


class Background(ThreadPoolExecutor):
    """A thread for work beside a run; a `with` block ends when this work is done.

    This way an error of the run does not interrupt a checkpoint that is being written.
    """

    def __init__(self):
        super().__init__(1)
        self._pending: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Starts work once the earlier work has ended."""
        self.wait()
        self._pending = self.submit(work)

    def wait(self) -> None:
        """Waits until the work is done, and raises its error if there was one."""
        future = self._pending
        self._pending = None
        if future is not None:
            future.result()


@dataclasses.dataclass
class Record:
    """The record of a shard. Earlier versions lacked the fields that have a default.

    Attributes:
        progress: the progress of the run until this checkpoint.
        settings: the settings that affect its results, by flag, as in JSON.
        versions: the versions of all packages that its results depend on.
        sent: the most bytes that a worker has sent; None if unknown.
        run_id: the id of the run; "" if it has none.
        start_id: a random id of this start or resumption; "" if it has none.
        data: the SHA-256 of the training data; "" if it has none.
    """

    progress: Progress
    settings: dict[str, Any]
    versions: dict[str, str]
    sent: float | None
    run_id: str = ""
    start_id: str = ""
    data: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns the record in JSON's types."""
        content = {x.name: getattr(self, x.name) for x in dataclasses.fields(self)}
        return files.to_json_value({**content, "progress": self.progress.to_json()})


def read_record(shard: Shard) -> Record:
    """Reads the record of a shard.

    Raises:
        ValueError: a field is unknown, missing or invalid; the message is one line.
    """
    content = shard.record
    try:
        progress = Progress.from_json(content["progress"])
        record = Record(**{**content, "progress": progress})
    except (AttributeError, KeyError, TypeError) as error:  # of another version
        raise ValueError(f"its record does not fit this version: {error}") from error
    if progress.step != shard.step:
        raise ValueError(f"its record is of step {progress.step}")
    return record


class Saver(NamedTuple):
    """Saves one run during training.

    Attributes:
        run: the run to save.
        progress: its progress, in which a complete save is noted.
        folder: the folder for its checkpoints.
        background: writes while the run continues; wait for it at the end of the run.
        run_ids: the ids of the run and of the run that it resumes; their old
            checkpoints may be removed.
        start_id: a random id of this start; shards with different ids are never
            combined.
    """

    run: Run
    progress: Progress
    folder: Path
    background: Background
    run_ids: Collection[str | None]
    start_id: str

    @property
    def _place(self) -> tuple[int, int]:
        """The number of this process's shards, and the number of shards in total."""
        return self.run.group.process, self.run.group.processes

    def save(self, state: TrainState, seconds: float, is_last: bool) -> None:
        """Writes this process's shard of a checkpoint, and removes old ones.

        If the shard cannot be written, for example on a full disk, a line reports it;
        the run continues, and older checkpoints stay. A single process writes a copy of
        its state in the background, but waits for the last checkpoint.

        Args:
            state: the state of the engine.
            seconds: the total time of the run until now.
            is_last: whether it is the last checkpoint of the run.
        """
        # Each process writes its own workers: on a slow link, sending them to the first
        # process would take longer than the rounds between two checkpoints.
        if not self.progress.step:  # there is nothing to keep
            return
        self.background.wait()  # at most one copy of the state is held
        store = partial(self._store, self._shard(state, seconds))
        if self.run.group.processes == 1:
            self.background.start(store)
        else:  # they agree on the outcome, in their main threads
            store()
        if is_last:  # training has ended, and another signal would interrupt the write
            self.background.wait()

    def _store(self, shard: Shard) -> None:
        """Writes a shard, removes old ones, and notes a complete save."""
        group = self.run.group
        failure = None
        try:
            shards.write_shard(self.folder, shard, *self._place)
        except OSError as error:
            failure = error
            group.note(
                f"the checkpoint of step {shard.step} was not saved in {self.folder}: "
                f"{error.strerror or error}; the run continues"
            )
        is_whole = not group.largest(failure is not None)
        with suppress(OSError):
            if is_whole:
                self.progress.saved = shard.step
                self._prune(shard.step)
            elif failure is None:  # without the other shards it is useless
                shards.remove_shards(
                    self.folder, [shard.step], *self._place, self.run_ids
                )

    def _shard(self, state: TrainState, seconds: float) -> Shard:
        """Returns this process's part of everything needed to resume."""
        run = self.run
        trainer = run.trainer
        progress = self.progress
        # Includes the center, for --resume-center with another number of workers.
        center = trainer.center(state)
        # Copied: arrays on a CPU may share device memory, which the next steps reuse.
        host_state = jax.tree.map(state_arrays.copy_view, trainer.to_host(state))
        record = Record(
            progress=dataclasses.replace(progress, earlier_seconds=seconds),
            settings=run.config.values("run"),
            versions=versions(),
            sent=run.rounds.count_bytes(progress),
            run_id=progress.run_id,
            start_id=self.start_id,
            data=run.data.sha256,
        )
        return Shard(
            step=progress.step,
            workers=trainer.workers,
            first=trainer.layout.own_workers.start,
            own=state_arrays.name_own_arrays(host_state),
            shared=state_arrays.name_shared_arrays(host_state, center),
            record=record.to_json(),
        )

    def _prune(self, newest: int) -> None:
        """Removes this process's shards of old checkpoints that the run has written."""
        best_step = None
        if self.run.config.keep == "best":
            saved_steps = {*shards.find_steps(self.folder)}
            evaluations = [
                x for x in self.progress.evaluations if x.step in saved_steps
            ]
            best_evaluation = find_best(evaluations)
            if best_evaluation is not None:
                best_step = best_evaluation.step
        number, num_shards = self._place
        shards.prune_shards(
            self.folder,
            keep=NUM_KEPT,
            number=number,
            num_shards=num_shards,
            newest=newest,
            run_ids=self.run_ids,
            best=best_step,
        )

    def open(self) -> None:
        """Removes the checkpoints that the run overwrites, or old ones.

        Raises:
            OSError: a file cannot be removed.
        """
        if self.run.config.overwrite:
            shards.prune_shards(self.folder, 0, *self._place)
        else:
            self._prune(self.progress.step)


def restore(run: Run, folder: Path, background: Background) -> Saver:
    """Returns the saver of a run, with its progress; resumes the run if asked to.

    Args:
        run: a run that is ready to start.
        folder: the folder for its checkpoints.
        background: writes checkpoints while the run continues.

    Raises:
        BadRequest: the folder holds a checkpoint or a config of another run, or none of
            its checkpoints can be used.
        Finished: it holds the finished run, without a checkpoint.
    """
    group = run.group
    out = folder.parent
    progress = Progress()
    random_numbers = group.gather([secrets.randbits(31) for _ in range(4)])[0]
    start_id = "".join(f"{int(x):08x}" for x in random_numbers)
    run_ids: list[str | None] = []
    shard = _newest(run, folder) if run.config.resume else None
    if shard is not None:
        run, progress = _restore_run(run, shard)
        run_ids.append(shard.record.get("run_id"))
        terminal.say(f"resuming from the checkpoint of step {progress.step}")
    elif run.config.resume:
        summary = {}
        if group.is_first:
            check_config(out, run.config)
            summary = _read_finished_summary(out, run.config)
        if group.largest(bool(summary)):
            raise Finished(out, summary)
        terminal.say(f"no checkpoint in {out}: the run starts from the beginning")
    elif not run.config.overwrite:
        is_used = True  # even if they cannot be listed, they must not be replaced
        with suppress(OSError):
            is_used = bool(shards.find_steps(folder))
        if group.largest(is_used):
            raise BadRequest(
                f"--out {out} already holds checkpoints: use another folder, --resume "
                "to continue from them, or --overwrite to start anew"
            )
    elif group.largest(_holds_linked_checkpoints(folder)):
        raise BadRequest(
            f"--overwrite would remove checkpoints where the link {folder} leads: "
            "remove the link, or use another --out"
        )
    progress.run_id = progress.run_id or start_id
    run_ids.append(progress.run_id)
    return Saver(run, progress, folder, background, run_ids, start_id)


def _holds_linked_checkpoints(folder: Path) -> bool:
    """Whether a folder of checkpoints is a link, to one that holds some."""
    if not folder.is_symlink():
        return False
    try:
        return bool(shards.find_steps(folder))
    except OSError:  # even if they cannot be listed, they must not be removed
        return True


def _newest(run: Run, folder: Path) -> Shard | None:
    """Returns the newest shard whose checkpoint all processes can use, or None.

    Raises:
        BadRequest: there are checkpoints, but none can be used; MayPass if a file could
            not be read and another attempt may succeed.
    """
    saved_steps: list[int] = []
    problems: list[Exception] = []
    try:
        saved_steps = shards.find_steps(folder)
    except OSError as error:
        problems.append(error)
    step = 2**31
    while True:
        # A host may lack the newest step: agree on one that all processes have.
        earlier_steps = [x for x in saved_steps if x < step]
        step = run.group.smallest(max(earlier_steps, default=-1))
        if step < 0:
            _check_begins(run, folder, saved_steps, problems)
            return None
        shard = _load_agreed(run, folder, step, problems)
        if shard is not None:
            return shard


def _check_begins(
    run: Run, folder: Path, saved_steps: list[int], problems: list[Exception]
) -> None:
    """Raises a BadRequest if a process has checkpoints that it cannot use.

    A run from the beginning would replace them.

    Args:
        run: a run that is ready to start.
        folder: the folder of its checkpoints.
        saved_steps: steps of the checkpoints in this process's folder.
        problems: why they could not be used.
    """
    unusable = [x for x in problems if not isinstance(x, Incomplete)]
    # An interrupted first save loses nothing: the next one replaces it.
    has_files = bool(unusable or (saved_steps and not shards.is_first_save(folder)))
    if not run.group.largest(has_files):
        return
    reason = problems[0] if problems else "not every process has a usable file"
    # A link may lead into a file system that is not mounted now.
    is_temporary = any(
        isinstance(x, FileNotFoundError) or may_pass(x) for x in unusable
    )
    if run.group.largest(is_temporary):
        raise MayPass(
            f"--resume: no checkpoint in {folder} can be used: {reason}; no file was "
            "removed: run the same command again"
        )
    raise BadRequest(
        f"--resume: no checkpoint in {folder} can be used: {reason}; no file was "
        "removed: --overwrite starts anew"
    )


def _load_agreed(
    run: Run, folder: Path, step: int, problems: list[Exception]
) -> Shard | None:
    """Returns this process's shard, if all processes have shards of one run."""
    group = run.group
    trainer = run.trainer
    shard = None

    def find_wanted_workers(workers: int) -> range:
        # New replicas start from the center, which is with each worker.
        return trainer.layout.own_workers if workers == trainer.workers else range(1)

    try:
        stored_shard = shards.load_workers(
            folder, step, find_wanted_workers, read_record
        )
        joined_shard = stored_shard._replace(
            own=join_pieces(stored_shard.own), shared=join_pieces(stored_shard.shared)
        )
        _check_pieces(trainer, run.state, joined_shard)
        shard = joined_shard
    except (DamagedShard, Incomplete, OSError) as error:
        problems.append(error)
        group.note(f"the checkpoint of step {step} cannot be used: {error}")
    if group.largest(shard is None) or shard is None:
        return None
    if group.agree(shards.common_identity(shard)):
        return shard
    problems.append(DamagedShard("its shard files are of different runs"))
    if group.is_first:
        group.note(f"the checkpoint of step {step} cannot be used: {problems[-1]}")
    return None


def _check_pieces(trainer: DataParallel, like: TrainState, shard: Shard) -> None:
    """Raises Incomplete if this process needs pieces of arrays that are not there.

    Args:
        trainer: the run's trainer.
        like: any state of the trainer, for its places on the devices.
        shard: a shard of a checkpoint, whose workers may have spanned processes.
    """
    has_same_workers = shard.workers == trainer.workers
    layout = trainer.layout
    placed_arrays = {}
    if has_same_workers and not layout.is_whole:
        leaves = jax.tree_util.tree_leaves_with_path((like.replica, like.sync))
        placed_arrays = {jax.tree_util.keystr(path): x for path, x in leaves}
    arrays = shard.own if has_same_workers else shard.shared
    for name, part in arrays.items():
        if not isinstance(part, HeldPart):
            continue
        placed_array = placed_arrays.get(name)
        if placed_array is None:
            raise Incomplete(
                f"only a part of {name} is here: its workers spanned several "
                "processes, whose files must be in one folder"
            )
        try:
            for device_shard in placed_array.addressable_shards:
                bounds = shards.find_bounds(device_shard.index, placed_array.shape)
                part.read(((0, layout.lanes), *bounds[2:]))
        except ValueError as error:
            raise Incomplete(f"array {name}: {error}") from None


def _restore_run(run: Run, shard: Shard) -> tuple[Run, Progress]:
    """Returns the run with a checkpoint's state, and the progress until then."""
    config = run.config
    trainer = run.trainer
    record = read_record(shard)
    progress = record.progress
    has_same_workers = shard.workers == trainer.workers
    if not has_same_workers and not config.resume_center:
        raise BadRequest(
            f"--resume: the checkpoint of step {shard.step} has {shard.workers} "
            f"workers, not {trainer.workers}: --resume-center starts new replicas from "
            "its center model"
        )
    if shard.step > config.steps:
        raise BadRequest(
            f"--resume: the checkpoint of step {shard.step} is after the last step, "
            f"--steps {config.steps}: use --steps {shard.step} or more"
        )
    check_settings(record.settings, config, has_same_workers)
    if record.data and record.data != run.data.sha256:
        raise BadRequest(
            f"--resume: the checkpoint of step {shard.step} used other data: the files "
            "have changed: restore them, or start anew with --overwrite"
        )
    num_decisions = count_decisions(run.state)
    if any(number >= num_decisions for _, number in progress.decided):
        raise BadRequest(
            f"--resume: the checkpoint of step {shard.step} has data-dependent syncs "
            f"that {config.algo} lacks: start anew with --overwrite"
        )
    if record.versions != versions() and run.group.is_first:
        terminal.say("other versions wrote the checkpoint: results may differ")
    arrays = run.state, shard.own, shard.shared
    try:
        if has_same_workers:
            state = state_arrays.restore_state(trainer, *arrays)
        else:
            state = state_arrays.restart_from_center(trainer, config.seed, *arrays)
    except state_arrays.Misfit as error:
        raise BadRequest(f"--resume: {error}") from error
    if not has_same_workers:
        progress.sent_before = record.sent
        progress.sent_since = shard.step
        progress.run_id = ""
    progress.saved = shard.step
    progress.resumed_at.append(shard.step)
    return run._replace(state=state), progress


def _read_finished_summary(out: Path, config: RunConfig) -> dict[str, Any]:
    """Returns the summary of the whole run in a folder; {} if there is none."""
    with suppress(files.Damaged, OSError):
        finished_run = run_folder.read_run(out)
        if finished_run is not None:
            summary = finished_run.summary
            # A run that diverged is over, whatever its number of steps.
            if summary.get("steps") == config.steps or summary["diverged"]:
                return summary
    return {}


def check_config(out: Path, config: RunConfig) -> None:
    """Raises a BadRequest if the config.json is damaged or belongs to another run."""
    path = out / "config.json"
    if not path.exists():
        return
    try:
        stored_config = files.read(path)
        with files.using(path):
            earlier_values = {}
            for name, value in stored_config["settings"].items():
                is_run_setting = name not in SETTINGS or SETTINGS[name].scope == "run"
                if is_run_setting and name not in REMOVED_FLAGS:
                    earlier_values[name] = value
            earlier_values |= stored_config["arguments"]
            earlier_values |= stored_config["task_arguments"]
    except files.Damaged as error:
        raise BadRequest(
            f"--resume: {error}; no file was removed: --overwrite starts anew"
        ) from error
    check_settings(earlier_values, config, has_same_workers=True)


def check_settings(
    earlier_values: dict[str, Any], config: RunConfig, has_same_workers: bool
) -> None:
    """Raises a BadRequest if the earlier run differs from the run to resume.

    Args:
        earlier_values: the earlier run's values that affect its results, by flag, as in
            JSON.
        config: the config of the run to resume.
        has_same_workers: whether both have the same number of workers.
    """
    values = files.to_json_value(config.values("run"))
    # A run started before a flag existed used the flag's default.
    defaults = {x.parameter: x.default for x in SETTINGS.values() if x.scope == "run"}
    defaults |= factories.describe_factory(ALGORITHM, config.algo).defaults
    defaults |= factories.describe_factory(TASK, config.task).defaults
    compared_values = files.to_json_value(defaults)
    for name, value in earlier_values.items():
        compared_values[RENAMED.get(f"{config.algo}.{name}", name)] = value
    # A flag that is gone had no effect unless it was set.
    for name in compared_values.keys() - values.keys():
        if compared_values[name] in (None, False):
            del compared_values[name]
    free_names: set[str] = set()
    if not has_same_workers:
        free_names |= {"workers", "batch_size", "accumulate"}
    if config.schedule == "constant":  # a longer run starts like a shorter one
        free_names.add("steps")

    def by_importance(name: str) -> tuple[bool, bool, str]:
        # Other tasks, algorithms and versions have other flags: name these first.
        return name not in ("task", "algo"), name in values, name

    names = (values.keys() | compared_values.keys()) - free_names
    for name in sorted(names, key=by_importance):
        value = values.get(name)
        earlier_value = compared_values.get(name)
        if value != earlier_value:
            flag = f"--{name.replace('_', '-')}"
            raise BadRequest(
                f"--resume: the run was made with {flag} {earlier_value}, not {value}"
            )
