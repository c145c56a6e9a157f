"""Runs whose processes are killed or stopped, whose disk is full, whose data is bad."""

import errno
import os
import re
import signal

import numpy as np
import pytest
from support.commands import free_address
from support.faults import by_hand, fill, remount, small_disk
from support.kills import in_training
from support.resumed_runs import assert_same_end, run, untimed_lines
from support.tiny_tasks import EXAMPLES, LABELS

from experiments.checkpoint.resume import FOLDER, Background
from experiments.checkpoint.shards import ShardName, find_steps
from experiments.data import sampling

NOTICED = 5  # seconds in which a lost process must be named
HASH = "params_sha256"


@pytest.fixture(autouse=True)
def _in_turn(monkeypatch):
    """Ends each write before the next fault: no disk changes in the middle of one."""
    monkeypatch.setattr(Background, "start", lambda self, work: work())


# Disks

LARGE_RUN = (
    "--task support.tiny_tasks:drawing --width 600 --workers 2 "
    "--optimizer adam --algo bmuf "
)
LARGE_RUN += "--period 4 --steps 11 --eval-every 4 --checkpoint-every 3"
ROOM = 32 << 10  # bytes: enough for a run's small files, too few for a checkpoint


@pytest.fixture(scope="module")
def run_with_room(tmp_path_factory):
    """The run on a disk with room."""
    return run(LARGE_RUN, tmp_path_factory.mktemp("wide") / "out")


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


def at_looks(actions):
    """Does something before some dispatches."""
    return lambda look: actions.get(look, lambda: None)()


UNSAVED = r"checkpoint of step (\d+) was not saved"


def not_saved(ended):
    """The steps of which a line says that there is no checkpoint, and why."""
    return re.findall(rf"^the {UNSAVED} in .*: (.*);", ended.stderr, re.M)


def room_for(disk, count, run_with_room):
    """Leaves room on a disk for so many checkpoints, and half of one."""
    size = (run_with_room.out / FOLDER / ShardName(11, 0, 1).file_name).stat().st_size
    return lambda: fill(disk, but=ROOM + size * count + size // 2)


@pytest.mark.slow
def test_full_disk_costs_checkpoints_and_not_the_run(disk, run_with_room):
    ended = run(
        LARGE_RUN, disk / "out", at_looks({1: room_for(disk, 2, run_with_room)})
    ).with_code(1)
    assert not_saved(ended) == [(x, os.strerror(errno.ENOSPC)) for x in ("9", "11")]
    assert find_steps(ended.out / FOLDER) == [6, 3]
    assert untimed_lines(ended) == untimed_lines(run_with_room)
    assert ended.summary[HASH] == run_with_room.summary[HASH]
    message = "the newest checkpoint is of step 6: --resume continues from there"
    assert message in ended.stderr.splitlines()
    (disk / "ballast").unlink()
    again = run(f"{LARGE_RUN} --resume", ended.out)
    assert again.summary["resumed_at"] == [6]
    assert "newest checkpoint" not in again.stderr
    assert_same_end(again, run_with_room)


@pytest.mark.long
def test_disk_that_takes_no_file_is_told_and_the_summary_is_shown(disk, run_with_room):
    ended = run(LARGE_RUN, disk / "out", at_looks({4: lambda: fill(disk)}))
    why = os.strerror(errno.ENOSPC)
    assert ended.code == 1
    assert not_saved(ended) == [(x, why) for x in ("6", "9", "11")]
    error_lines = [x for x in ended.stderr.splitlines() if "incomplete" in x]
    assert error_lines == [f"--out {ended.out}: {why}: its files are incomplete"]
    assert ended.stderr.count("metrics.jsonl") == 1  # told once, not at every line
    assert "Traceback" not in ended.stderr
    assert re.search(r"^bmuf on support.tiny_tasks:drawing: 11 steps", ended.stdout)
    assert re.search(r"^  test loss +\d", ended.stdout, re.M)
    assert not (ended.out / "summary.json").exists()
    (disk / "ballast").unlink()
    assert_same_end(run(f"{LARGE_RUN} --resume", ended.out), run_with_room)


@pytest.mark.slow
def test_disk_that_comes_back_gets_what_it_missed(disk, run_with_room):
    faults = at_looks({4: lambda: remount(disk, "ro"), 7: lambda: remount(disk, "rw")})
    ended = run(LARGE_RUN, disk / "out", faults)
    assert not_saved(ended) == [("6", os.strerror(errno.EROFS))]
    assert_same_end(ended, run_with_room)
    assert find_steps(ended.out / FOLDER) == [11, 9, 3]


@pytest.mark.slow
def test_no_part_is_left_of_a_checkpoint_that_one_process_cannot_write(
    start, tmp_path, run_with_room
):
    folder = tmp_path / "out" / FOLDER
    in_its_way = {ShardName(step, 1, 2).file_name for step in (3, 6, 9, 11)}
    for name in in_its_way:
        (folder / name).mkdir(parents=True)
    ended = start(f"{LARGE_RUN} --processes 2").ended().with_code(1)
    unsaved = re.findall(rf"^(.*)the {UNSAVED} in ", ended.stderr, re.M)
    assert unsaved == [("process 1: ", x) for x in ("3", "6", "9", "11")]
    assert "no checkpoint could be saved: --resume would start from" in ended.stderr
    assert untimed_lines(ended) == untimed_lines(run_with_room)
    assert ended.summary[HASH] == run_with_room.summary[HASH]
    assert {x.name for x in folder.iterdir()} == in_its_way


# Several processes

LONG = (
    "--task support.tiny_tasks:drawing --workers 4 --optimizer adam "
    "--algo bmuf --period 4 "
)
LONG += "--steps 400 --eval-every 100 --checkpoint-every 20"


@pytest.mark.slow
def test_signal_to_the_command_saves_everywhere(start, tmp_path):
    words = f"{LONG} --workers 2"
    command = start(f"{words} --processes 2".replace("--checkpoint-every 20", ""))
    command.wait_for("step 100/400")
    os.kill(command.member(1), signal.SIGTERM)  # a scheduler may tell all of them
    command.kill(signal.SIGTERM)
    ended = command.ended().with_code(75)
    step = ended.summary["steps"]
    assert 100 <= step < 400
    assert ended.summary["stopped"] is True
    assert find_steps(ended.out / FOLDER) == [step]
    assert len([*(ended.out / FOLDER).iterdir()]) == 2
    again = start(f"{words} --processes 2 --resume").ended()
    assert again.summary["resumed_at"] == [step]
    assert_same_end(again, run(words, tmp_path / "alone"))


@pytest.mark.parametrize(
    "count, number, who",
    [
        pytest.param(2, 1, "process 1", marks=pytest.mark.slow),
        pytest.param(2, 0, "process 0 at {at}", marks=pytest.mark.long),
        pytest.param(4, 2, "another process", marks=pytest.mark.long),
    ],
)
def test_loss_is_told_by_all_commands_that_are_left(count, number, who, start):
    coordinator = free_address()
    words = f"{LONG} --steps 40000"
    commands_left = [start(by_hand(coordinator, i, words, count)) for i in range(count)]
    in_training(commands_left[0])
    commands_left.pop(number).kill()
    for command in commands_left:
        ended = command.ended(2 * NOTICED)
        assert "Traceback" not in ended.stderr
        if not number and ended.code == -signal.SIGABRT:  # jax's service is gone, too
            assert "JAX distributed service detected fatal errors" in ended.stderr
            continue
        assert ended.code == 75
        assert ended.stderr.splitlines()[-1].startswith(
            f"{who.format(at=coordinator)} is gone ("
        )


# Losses that are not finite

POISONED = (
    "--task support.tiny_tasks:poisoned --workers 4 --partition label --algo bmuf "
)
POISONED += "--period 8 --steps 12 --eval-every 12 --dispatch-steps 4"
POISONED_STEP = 5  # the step in which it happens, from 0


def poisoned_worker():
    """The one that has the examples with label 1."""
    labels = np.arange(EXAMPLES) % LABELS
    shards = sampling.shards("label", {"label": labels}, EXAMPLES, 4, 0)
    assert shards is not None
    (worker,) = [i for i, rows in enumerate(shards) if 1 in labels[rows]]
    assert {*labels[shards[worker]]} == {1}
    return worker


def assert_names_the_worker(ended):
    worker = poisoned_worker()
    summary = ended.with_code(3).summary
    assert summary["diverged_at"] == POISONED_STEP
    assert summary["not_finite_workers"] == [worker]
    diverged_lines = [x for x in ended.stderr.splitlines() if x.startswith("diverged")]
    assert len(diverged_lines) == 1
    assert (
        f"the loss of step {POISONED_STEP} was not finite on worker {worker}"
        in diverged_lines[0]
    )
    assert " or " not in diverged_lines[0]


@pytest.mark.slow
def test_worker_whose_loss_is_not_finite_is_named_and_nothing_of_it_saved(tmp_path):
    out = tmp_path / "out"
    assert_names_the_worker(run(f"{POISONED} --checkpoint-every 4", out))
    assert find_steps(out / FOLDER) == [4]


@pytest.mark.long
def test_worker_whose_loss_is_not_finite_is_named_by_two_processes(start):
    assert_names_the_worker(start(f"{POISONED} --processes 2").ended())


@pytest.mark.parametrize(
    "when, code, message",
    [
        pytest.param("init", 2, "no init here", marks=pytest.mark.slow),
        pytest.param("read", 75, "the disk is on fire", marks=pytest.mark.long),
    ],
)
def test_task_that_fails_on_one_process_ends_all_alike(when, code, message, start):
    words = LONG.replace("drawing", f"failing --when {when}")
    ended = start(f"{words} --processes 2").ended(60)
    assert ended.code == code, ended.stderr
    [error_line] = [x for x in ended.stderr.splitlines() if x.startswith("process 1: ")]
    assert message in error_line
    assert ended.stdout == ""
