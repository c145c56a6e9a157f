"""Runs whose processes are killed or stopped, whose disk is full, whose data is bad."""

import errno
import os
import re
import signal
import time

import numpy as np
import pytest
from commands import free_address
from faults import commands, fill, remount, small_disk, until
from kills import newest
from lasting import assert_same_end, lines_of, run
from tiny_tasks import EXAMPLES, LABELS

from experiments.checkpoint.background import Background
from experiments.checkpoint.folder import steps
from experiments.checkpoint.manager import FOLDER
from experiments.checkpoint.shard_file import ShardName, unfinished_name
from experiments.pipeline import partition

NOTICED = 5  # seconds in which a lost process must be named
HASH = "params_sha256"


@pytest.fixture(autouse=True)
def _in_turn(monkeypatch):
    """Ends each write before the next fault: no disk changes in the middle of one."""
    monkeypatch.setattr(Background, "start", lambda self, work: work())


@pytest.fixture
def start(tmp_path):
    with commands(tmp_path) as start:
        yield start


# Disks

WIDE = "--task tiny_tasks:drawing --width 600 --workers 2 --optimizer adam --algo bmuf "
WIDE += "--period 4 --steps 11 --eval-every 4 --checkpoint-every 3"
ROOM = 32 << 10  # bytes: enough for a run's small files, too few for a checkpoint


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """The run on a disk with room."""
    return run(WIDE, tmp_path_factory.mktemp("wide") / "out")


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "4m") as folder:
        yield folder


class AtLooks:
    """Does something before some dispatches; `done` tells before which it did."""

    def __init__(self, actions):
        self.actions, self.done = actions, []

    def __call__(self, now):
        if now in self.actions:
            self.actions[now]()
            self.done.append(now)


UNSAVED = r"checkpoint of step (\d+) was not saved"


def not_saved(ended):
    """The steps of which a line says that there is no checkpoint, and why."""
    return re.findall(rf"^the {UNSAVED} in .*: (.*);", ended.stderr, re.M)


def test_full_disk_costs_checkpoints_and_not_the_run(disk, wide):
    faults = AtLooks({5: lambda: fill(disk, but=ROOM)})
    ended = run(WIDE, disk / "out", faults)
    assert faults.done == [5]
    why = os.strerror(errno.ENOSPC)
    assert not_saved(ended) == [(x, why) for x in ("6", "9", "11")]
    assert ended.code == 0, ended.stderr
    assert lines_of(ended) == lines_of(wide)
    assert ended.summary[HASH] == wide.summary[HASH]
    assert steps(ended.out / FOLDER) == [3]


def room_for(disk, count, wide):
    """Leaves room on a disk for so many checkpoints, and half of one."""
    size = (wide.out / FOLDER / ShardName(11, 0, 1).file_name).stat().st_size
    return lambda: fill(disk, but=ROOM + size * count + size // 2)


def test_disk_with_room_for_two_checkpoints_keeps_them_and_says_which(disk, wide):
    ended = run(WIDE, disk / "out", AtLooks({1: room_for(disk, 2, wide)}))
    assert ended.code == 0, ended.stderr
    assert [step for step, _ in not_saved(ended)] == ["9", "11"]
    assert steps(ended.out / FOLDER) == [6, 3]
    told = "the newest checkpoint is of step 6: --resume continues from there"
    assert told in ended.stderr.splitlines()
    (disk / "ballast").unlink()
    again = run(f"{WIDE} --resume", ended.out)
    assert again.summary["resumed_at"] == [6]
    assert "newest checkpoint" not in again.stderr
    assert_same_end(again, wide)


@pytest.mark.slow
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS], ids=["full", "ro"])
def test_disk_that_takes_no_file_is_told_and_the_summary_is_shown(number, disk, wide):
    is_full = number == errno.ENOSPC
    faults = AtLooks({4: lambda: fill(disk) if is_full else remount(disk, "ro")})
    ended = run(WIDE, disk / "out", faults)
    assert faults.done == [4]
    why = os.strerror(number)
    assert ended.code == 1
    assert not_saved(ended) == [(x, why) for x in ("6", "9", "11")]
    told = [x for x in ended.stderr.splitlines() if "incomplete" in x]
    assert told == [f"--out {ended.out}: {why}: its files are incomplete"]
    assert ended.stderr.count("metrics.jsonl") == 1  # told once, not at every line
    assert "Traceback" not in ended.stderr
    assert re.search(r"^bmuf on tiny_tasks:drawing: 11 steps", ended.stdout)
    assert re.search(r"^  test loss +\d", ended.stdout, re.M)
    assert not (ended.out / "summary.json").exists()
    (disk / "ballast").unlink() if is_full else remount(disk, "rw")
    assert_same_end(run(f"{WIDE} --resume", ended.out), wide)


def test_disk_that_comes_back_gets_what_it_missed(disk, wide):
    faults = AtLooks({4: lambda: remount(disk, "ro"), 7: lambda: remount(disk, "rw")})
    ended = run(WIDE, disk / "out", faults)
    assert faults.done == [4, 7]
    assert not_saved(ended) == [("6", os.strerror(errno.EROFS))]
    assert ended.code == 0, ended.stderr
    assert_same_end(ended, wide)
    assert steps(ended.out / FOLDER) == [11, 9, 3]


@pytest.mark.slow
def test_full_disk_costs_several_processes_no_more(start, disk, wide):
    fill(disk, but=ROOM)
    ended = start(f"{WIDE} --processes 2", disk / "out").ended()
    assert ended.code == 0, ended.stderr
    for whose in ("", "process 1: "):
        for step in (3, 6, 9, 11):
            assert f"\n{whose}the checkpoint of step {step} was not sav" in ended.stderr
    assert ended.stderr.count(os.strerror(errno.ENOSPC)) == 8
    assert lines_of(ended) == lines_of(wide)
    assert ended.summary[HASH] == wide.summary[HASH]
    assert not any((ended.out / FOLDER).iterdir())
    assert (
        "no checkpoint could be saved: --resume would start from the " in ended.stderr
    )


@pytest.mark.slow
def test_no_part_is_left_of_a_checkpoint_that_one_process_cannot_write(
    start, tmp_path, wide
):
    folder = tmp_path / "out" / FOLDER
    (folder / unfinished_name(1, 2)).mkdir(parents=True)  # in its way
    ended = start(f"{WIDE} --processes 2").ended()
    assert ended.code == 0, ended.stderr
    told = re.findall(rf"^(.*)the {UNSAVED} in ", ended.stderr, re.M)
    assert told == [("process 1: ", x) for x in ("3", "6", "9", "11")]
    assert ended.summary[HASH] == wide.summary[HASH]
    assert [x.name for x in folder.iterdir()] == [unfinished_name(1, 2)]


# Several processes

LONG = "--task tiny_tasks:drawing --workers 4 --optimizer adam --algo bmuf --period 4 "
LONG += "--steps 400 --eval-every 100 --checkpoint-every 20"
TWO, FOUR = f"{LONG} --processes 2", f"{LONG} --processes 4"


def unharmed(words, folder):
    """A run of which no process is lost."""
    with commands(folder) as start:
        ended = start(words).ended()
    assert ended.code == 0, ended.stderr
    return ended


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    return unharmed(TWO, tmp_path_factory.mktemp("of_two"))


@pytest.fixture(scope="module")
def of_four(tmp_path_factory):
    return unharmed(FOUR, tmp_path_factory.mktemp("of_four"))


def in_training(command, step=40):
    """Waits until all processes have saved a step."""
    until(lambda: newest(command.run_out) >= step, f"step {step}")


def lose(command, number, sign=signal.SIGKILL):
    """Sends a process a signal; returns its pid and when it was."""
    pid = command.member(number)
    os.kill(pid, sign)
    return pid, time.monotonic()


def assert_named(command, number, pid, since):
    """A killed process is named in time."""
    command.wait_for(rf"process {number} \(pid {pid}\) was killed by SIGKILL", NOTICED)
    assert time.monotonic() - since < NOTICED


def assert_lost(ended, number):
    """The run ended by a loss, which one line reports."""
    assert ended.code == 75, ended.stderr
    assert len(re.findall(rf"^process {number} .*", ended.stderr, re.M)) == 1
    assert "Traceback" not in ended.stderr
    assert ended.stdout == ""


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("number", [0, 2])
def test_one_of_four_that_is_killed_is_named_and_ends_all(number, start):
    command = start(FOUR)
    in_training(command)
    assert_named(command, number, *lose(command, number))
    assert_lost(command.ended(NOTICED), number)


@pytest.mark.slow
def test_four_survive_two_kills(start, of_four):
    command = start(f"{FOUR} --max-restarts 2")
    for number, step, told in ((2, 40, "restart 1 of 2"), (0, 200, "restart 2 of 2")):
        in_training(command, step)
        assert_named(command, number, *lose(command, number))
        command.wait_for(told)
    ended = command.ended()
    assert len(ended.summary["resumed_at"]) == 2
    assert_same_end(ended, of_four)


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize(
    "number, code", [(signal.SIGTERM, 75), (signal.SIGINT, 130)], ids=str
)
def test_signal_to_the_launcher_saves_everywhere(number, code, start, of_two):
    command = start(TWO.replace("--checkpoint-every 20", ""))
    command.wait_for("step 100/400")
    os.kill(command.member(1), signal.SIGTERM)  # a scheduler may tell all of them
    command.kill(number)
    ended = command.ended()
    assert ended.code == code, ended.stderr
    step = ended.summary["steps"]
    assert 100 <= step < 400
    assert ended.summary["stopped"] is True
    assert steps(ended.out / FOLDER) == [step]
    assert len([*(ended.out / FOLDER).iterdir()]) == 2
    again = start(f"{TWO} --resume").ended()
    assert again.summary["resumed_at"] == [step]
    assert_same_end(again, of_two)


# Commands that join by hand


def by_hand(at, number, words=LONG, count=2):
    return f"{words} --coordinator {at} --num-processes {count} --process-id {number}"


@pytest.mark.long
def test_commands_joined_by_hand_make_the_run_of_one_command(start, of_two):
    at = free_address()
    first, second = (start(by_hand(at, number)) for number in (0, 1))
    ended, other = first.ended(), second.ended()
    assert other.code == 0, other.stderr
    assert other.stdout == ""
    assert_same_end(ended, of_two)


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("number", [0, 1])
def test_lost_process_is_named_by_the_other_command(number, start):
    at = free_address()
    both = [start(by_hand(at, i)) for i in (0, 1)]
    in_training(both[0])
    both[number].kill()
    ended = both[1 - number].ended(2 * NOTICED)
    assert "Traceback" not in ended.stderr
    if not number and ended.code == -signal.SIGABRT:  # jax's service is gone, too
        assert "JAX distributed service detected fatal errors" in ended.stderr
        return
    assert ended.code == 75
    who = f"process {number}{'' if number else f' at {at}'}"
    assert ended.stderr.splitlines()[-1].startswith(f"{who} is gone")


@pytest.mark.long
def test_loss_of_one_of_four_ends_the_others(start):
    at, words = free_address(), f"{LONG} --steps 40000"
    all_four = [start(by_hand(at, i, words, 4)) for i in range(4)]
    in_training(all_four[0])
    all_four[2].kill()
    ended = [all_four[i].ended(2 * NOTICED) for i in (0, 1, 3)]
    assert [x.code for x in ended] == [75] * 3
    for told in (x.stderr.splitlines()[-1] for x in ended):
        assert told.startswith("another process is gone (")


def test_commands_that_disagree_end_with_one_line_each(start):
    at = free_address()
    both = start(by_hand(at, 0)), start(f"{by_hand(at, 1)} --seed 1")
    for command in both:
        ended = command.ended()
        assert ended.code == 4
        assert ended.stderr == "process 1 has --seed 1, but process 0 has --seed 0\n"
        assert ended.stdout == ""


# Losses that are not finite

POISONED = "--task tiny_tasks:poisoned --workers 4 --partition label --algo bmuf "
POISONED += "--period 8 --steps 12 --eval-every 12 --dispatch-steps 4"
AT = 5  # the step in which it happens, from 0


def poisoned_worker():
    """The one that has the examples with label 1."""
    labels = np.arange(EXAMPLES) % LABELS
    shards = partition.shards("label", {"label": labels}, EXAMPLES, 4, 0)
    assert shards is not None
    (worker,) = [i for i, rows in enumerate(shards) if 1 in labels[rows]]
    assert {*labels[shards[worker]]} == {1}
    return worker


def assert_names_the_worker(ended):
    worker = poisoned_worker()
    assert ended.code == 3, ended.stderr
    summary = ended.summary
    assert summary["diverged_at"] == AT
    assert summary["not_finite_workers"] == [worker]
    told = [x for x in ended.stderr.splitlines() if x.startswith("diverged")]
    assert len(told) == 1
    assert f"the loss of step {AT} was not finite on worker {worker}" in told[0]


@pytest.mark.parametrize(
    "backend",
    ["pmap", *(pytest.param(x, marks=pytest.mark.slow) for x in ("shard_map", "vmap"))],
)
def test_worker_whose_loss_is_not_finite_is_named(backend, tmp_path):
    ended = run(f"{POISONED} --backend {backend}", tmp_path / "out")
    assert_names_the_worker(ended)


@pytest.mark.slow
def test_worker_whose_loss_is_not_finite_is_named_by_two_processes(start):
    assert_names_the_worker(start(f"{POISONED} --processes 2").ended())


@pytest.mark.slow
def test_run_that_diverged_is_resumed_from_before(tmp_path):
    """Values that are not finite are not saved."""
    out = tmp_path / "out"
    ended = run(f"{POISONED} --checkpoint-every 4", out)
    assert ended.code == 3
    assert steps(out / FOLDER) == [4]
    again = run(f"{POISONED} --resume", out)
    assert "resuming from the checkpoint of step 4" in again.stderr
    assert_names_the_worker(again)


# Tasks that fail on one process alone


@pytest.mark.slow
@pytest.mark.parametrize("when", ["make", "load", "init", "read"])
def test_task_that_fails_on_one_process_ends_all_with_one_line(when, start):
    words = TWO.replace("drawing", f"failing --when {when}")
    ended = start(words).ended(60)
    assert ended.code == (75 if when == "read" else 2), ended.stderr
    told = [x for x in ended.stderr.splitlines() if x.startswith("process 1: ")]
    assert len(told) == 1, ended.stderr
    what = "the disk is on fire" if when == "read" else f"no {when} here"
    assert what in told[0]
    assert ended.stdout == ""
