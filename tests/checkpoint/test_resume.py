"""Runs that were stopped go on as if they never had been."""

import functools
import json
import os
import shutil
from pathlib import Path

import pytest
from support.requirements import parameters
from support.resumed_runs import (
    Crash,
    ResumedWork,
    assert_near,
    assert_same_end,
    crash_before,
    files,
    format_flags,
    joined,
    load_newest,
    run,
    signal_before,
)
from support.small_tasks import task_folder
from support.tiers import tiers

from experiments.api import train
from experiments.checkpoint.resume import FOLDER
from experiments.checkpoint.shards import (
    ShardName,
    find_steps,
    load_workers,
    write_shard,
)
from experiments.command.errors import BadRequest
from experiments.training.config import parse

# Of rounds of four steps and epochs of five, seven steps end neither.
TINY = "--task support.tiny_tasks:drawing --workers 2 --optimizer adam --steps 11"
TINY += " --eval-every 4 --checkpoint-every 3"
BMUF = f"{TINY} --algo bmuf --period 4"
STOP = 8  # the look that stops a run after seven steps


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """A run without interruption; not to be changed."""
    return run(BMUF, tmp_path_factory.mktemp("whole") / "out")


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The same, stopped after seven steps; not to be changed."""
    ended = run(BMUF, tmp_path_factory.mktemp("stopped") / "out", signal_before(STOP))
    assert ended.code == 75
    assert find_steps(ended.out / FOLDER) == [7, 6, 3]
    return ended


@pytest.fixture
def out(stopped, tmp_path):
    """A copy of the stopped run's folder."""
    return shutil.copytree(stopped.out, tmp_path / "out")


# Algorithms


def assert_goes_on(out, uninterrupted, step=7, command=BMUF):
    """The run of a folder goes on from a step, and ends as one that was not stopped."""
    ended = run(f"{command} --resume", out)
    assert f"resuming from the checkpoint of step {step}\n" in ended.stderr
    assert ended.summary["resumed_at"][-1] == step
    assert_same_end(ended, uninterrupted)
    return ended


def assert_resumed_is_uninterrupted(command, tmp_path):
    """A run that was stopped after seven steps ends as one that was not."""
    stopped_run = run(command, tmp_path / "stopped", signal_before(STOP)).with_code(75)
    assert_goes_on(stopped_run.out, run(command, tmp_path / "whole"), command=command)


def make_words(name):
    """The tiny run by an algorithm."""
    return f"{TINY} {format_flags(name, parameters(name))}"


@pytest.mark.slow
def test_resumed_run_of_an_algorithm_rich_in_state_is_the_uninterrupted_one(tmp_path):
    assert_resumed_is_uninterrupted(make_words("scaffold"), tmp_path)


@pytest.fixture(scope="module")
def in_two(tmp_path_factory):
    """Makes runs in two processes, or more; the same ones once."""

    @functools.cache
    def make(works, processes=2):
        return joined(processes, works, tmp_path_factory.mktemp("joined"))

    return make


@pytest.mark.slow
def test_resumed_run_of_two_processes_is_the_uninterrupted_one(in_two, tmp_path):
    """By an algorithm that keeps a residual of each worker."""
    command = make_words("topk_sgd")
    out = str(tmp_path / "out")
    works = ResumedWork(command, f"{out}-whole"), ResumedWork(command, out, STOP)
    uninterrupted, stopped_run, ended = in_two(
        (*works, ResumedWork(f"{command} --resume", out))
    )
    assert stopped_run.code == 75, stopped_run.stderr
    expected_names = set()
    for step in (7, 9, 11):
        expected_names.add(ShardName(step, 0, 2).file_name)
        expected_names.add(ShardName(step, 1, 2).file_name)
    assert {path.name for path in (ended.out / FOLDER).iterdir()} == expected_names
    assert "resuming from the checkpoint of step 7" in ended.stderr
    assert_same_end(ended, uninterrupted)


# What else a run may carry along


@pytest.mark.slow
def test_resumed_run_with_more_to_carry_is_the_uninterrupted_one(tmp_path):
    """A synchronous start, averaged moments, a schedule, and labels of its own."""
    command = f"{BMUF} --sync-until 5 --opt-state-at-sync average --accumulate 2 "
    command += "--partition label --displacements --schedule cosine --warmup-steps 3"
    assert_resumed_is_uninterrupted(command, tmp_path)


@pytest.mark.slow
def test_displacements_of_a_round_that_was_not_measured_are_left_out(tmp_path):
    """Rounds end after steps 3, 6 and 9, of which the first run measures 3 and 9."""
    command = f"{TINY} --algo bmuf --period 3 --displacements"
    out = tmp_path / "out"
    assert run(f"{command} --eval-every 5", out, signal_before(STOP)).code == 75
    ended = run(f"{command} --eval-every 8 --resume", out)
    lines = {x["step"]: x["pseudo_gradient"] for x in ended.lines}
    assert [x is None for x in lines.values()] == [False, True, False], lines


@pytest.mark.long
def test_resumed_run_with_sharded_tables_is_the_uninterrupted_one(tmp_path):
    command = (
        f"--task embeddings --batch-size 16 --data-dir {task_folder('embeddings')}"
    )
    command += " --order 3 --width 4 --tables sharded --negatives 4 --workers 2"
    command += " --algo bmuf --period 4 --steps 9 --eval-every 4 --checkpoint-every 6"
    assert_resumed_is_uninterrupted(f"{command} --dispatch-steps 1", tmp_path)


# Other devices and processes


@pytest.mark.slow
def test_run_goes_on_with_other_numbers_of_devices(tmp_path):
    command = f"{BMUF} --workers 6 --batch-size 24"
    uninterrupted = run(f"{command} --devices 0", tmp_path / "whole")
    out = tmp_path / "out"
    assert run(f"{command} --backend vmap", out, signal_before(5)).code == 75
    run(f"{command} --devices 0,1 --resume", out, signal_before(4)).with_code(75)
    three = run(f"{command} --backend shard_map --resume", out).with_code(0)
    assert three.summary["resumed_at"] == [4, 7]
    assert three.summary["devices"] == 3
    assert_near(three, uninterrupted, "bytes_per_worker")


@pytest.mark.long
def test_processes_take_over_from_each_other(in_two, tmp_path):
    command = f"{BMUF} --workers 4"
    out = tmp_path / "out"
    alone = f"{command} --devices 0,1"
    assert run(alone, out, signal_before(5)).code == 75
    (two,) = in_two((ResumedWork(f"{command} --resume", str(out), 4),))
    assert (two.code, two.summary["steps"]) == (75, 7), two.stderr
    ended = run(f"{alone} --resume", out)
    assert ended.summary["resumed_at"] == [4, 7]
    assert_near(ended, run(alone, tmp_path / "whole"), "bytes_per_worker")


def assert_refused(out, command, message, code=2):
    """The command ends with a line that begins so, and leaves all as it was."""
    old_files = files(out.parent)
    ended = run(command, out)
    assert ended.code == code
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: {message}"), line
    assert files(out.parent) == old_files


# Other numbers of workers


@pytest.mark.parametrize("workers", tiers([1, 4], slow=[4]))
def test_new_workers_start_from_the_center(workers, stopped, out):
    ended = run(f"{BMUF} --workers {workers} --steps 7 --resume-center", out)
    assert ended.code == 0, ended.stderr
    assert ended.lines[-1]["step"] == 7
    for name in ("test_loss", "test_accuracy"):
        assert ended.lines[-1][name] == pytest.approx(stopped.lines[-1][name], rel=1e-6)
    assert ended.summary["params_sha256"] == stopped.summary["params_sha256"]
    # Its bytes include those of other workers, whose syncs are not known.
    assert ended.summary["syncs"] is None and " syncs" not in ended.stdout


@pytest.mark.long
def test_schedule_and_bytes_go_on_with_new_workers(tmp_path):
    schedule = "--optimizer sgd --momentum 0.9 --schedule cosine --warmup-steps 3"
    command = f"{BMUF} {schedule}"
    out = tmp_path / "out"
    (*_, last_line) = run(command, out, signal_before(STOP)).lines
    uninterrupted = run(f"{command} --workers 4", tmp_path / "whole")
    ended = run(f"{command} --workers 4 --resume-center", out).with_code(0)
    counts = {k: x for k, x in load_newest(ended).own.items() if k.endswith("count")}
    assert len(counts) == 1
    assert all((x == 11).all() for x in counts.values())
    expected_bytes = {x["step"]: x["bytes_per_worker"] for x in uninterrupted.lines}
    assert last_line["bytes_per_worker"] > 0
    since = (
        expected_bytes[8] - expected_bytes[4]
    )  # what is sent in the sync after step 8
    bytes_by_step = {x["step"]: x["bytes_per_worker"] for x in ended.lines}
    assert bytes_by_step[8] == last_line["bytes_per_worker"] + since
    assert bytes_by_step[11] == ended.summary["bytes_per_worker"] == bytes_by_step[8]


@pytest.mark.long
def test_new_workers_go_on_after_another_stop(stopped, out, tmp_path):
    copy = shutil.copytree(out, tmp_path / "copy")
    four = f"{BMUF} --workers 4"
    uninterrupted = run(f"{four} --resume-center", copy)
    assert run_id(uninterrupted) != run_id(stopped)  # it is another run
    assert run(f"{four} --resume-center", out, signal_before(3)).code == 75
    assert assert_goes_on(out, uninterrupted, 9, four).summary["resumed_at"] == [7, 9]


# Nothing to go on from


@pytest.mark.slow
@pytest.mark.parametrize("export", tiers([False, True], [False]))
def test_a_finished_run_without_checkpoints_says_so_and_stays(
    export, uninterrupted, tmp_path
):
    out = shutil.copytree(uninterrupted.out, tmp_path / "out")
    shutil.rmtree(out / FOLDER)
    old_files = files(out)
    model = tmp_path / "m.safetensors"
    ended = run(f"{BMUF} --resume" + f" --export {model}" * export, out)
    assert ended.code == export
    finished_line, *export_lines = ended.stderr.splitlines()
    assert (
        finished_line
        == f"the run in {out} is finished, and has no checkpoint: its files stay"
    )
    missing = f"no model was written to {model}: no checkpoint holds it"
    assert export_lines == [missing] * export
    assert "test loss" in ended.stdout and files(out) == old_files
    with pytest.raises(BadRequest, match="is finished, and has no checkpoint"):
        train(parse([*BMUF.split(), "--resume", "--out", str(out)]))


def assert_none_serves(out, code, advice, processes=1, command=BMUF):
    """--resume is refused, each checkpoint is named, and all is as it was."""
    old_files = files(out)
    ended = run(f"{command} --resume", out)
    assert ended.code == code, ended.stderr
    *checkpoint_lines, error = ended.stderr.splitlines()
    checkpoints = [
        ShardName(step, processes - 1, processes).file_name
        for step in find_steps(out / FOLDER)
    ]
    for line, name in zip(checkpoint_lines, checkpoints, strict=True):
        assert " cannot be used: " in line and name in line
    assert error.startswith(f"error: --resume: no checkpoint in {out / FOLDER} can be ")
    assert checkpoints[0] in error and error.endswith(
        f"; no file was removed: {advice}"
    )
    assert files(out) == old_files


ANEW = "--overwrite starts anew"


@pytest.mark.slow
def test_where_all_checkpoints_are_damaged_none_is_removed(out, uninterrupted):
    for path in (out / FOLDER).iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    assert_none_serves(out, 2, ANEW)
    ended = run(f"{BMUF} --overwrite", out)
    assert find_steps(out / FOLDER) == [11, 9, 6]
    assert_same_end(ended, uninterrupted)


@pytest.mark.slow
def test_checkpoints_that_cannot_be_read_now_are_left_for_later(
    out, uninterrupted, tmp_path
):
    """As links into a file system that is not mounted."""
    mounted = tmp_path / "mounted"
    away = tmp_path / "away"
    shutil.move(out / FOLDER, mounted)
    (out / FOLDER).mkdir()
    for path in mounted.iterdir():
        (out / FOLDER / path.name).symlink_to(path)
    mounted.rename(away)
    assert_none_serves(out, 75, "run the same command again")
    away.rename(mounted)
    assert_goes_on(out, uninterrupted)


def test_one_link_to_itself_hides_no_other_checkpoint(out, uninterrupted):
    loop = out / FOLDER / ShardName(9, 0, 1).file_name
    loop.symlink_to(loop.name)
    ended = run(f"{BMUF} --resume", out)
    assert f"{loop.name}'" in ended.stderr and "symbolic links" in ended.stderr
    assert "resuming from the checkpoint of step 7\n" in ended.stderr
    assert_same_end(ended, uninterrupted)


@pytest.mark.slow
@pytest.mark.parametrize("end", ["pipe", "device"])
def test_a_checkpoint_that_is_no_file_hides_no_other(end, out, uninterrupted):
    path = out / FOLDER / ShardName(9, 0, 1).file_name
    if end == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    assert_goes_on(out, uninterrupted)


@pytest.mark.slow
def test_a_run_with_pipes_in_place_of_checkpoints_does_not_start_anew(out):
    for path in (out / FOLDER).iterdir():
        path.unlink()
        os.mkfifo(path)
    ended = run(f"{BMUF} --resume", out)
    assert ended.code == 2
    assert "it is not a regular file" in ended.stderr


def test_checkpoints_behind_a_link_are_not_overwritten(out, tmp_path):
    elsewhere = tmp_path / "there"
    shutil.move(out / FOLDER, elsewhere)
    (out / FOLDER).symlink_to(elsewhere)
    old_files = files(elsewhere)
    ended = run(f"{BMUF} --overwrite", out)
    assert ended.code == 2
    assert f"the link {out / FOLDER} leads: remove the link" in ended.stderr
    assert files(elsewhere) == old_files


def only_half(source, out, step):
    """Leaves one of two shards of a checkpoint."""
    for path in (out / FOLDER).iterdir():
        path.unlink()
    split(source, out / FOLDER, 0, step)


@pytest.mark.slow
def test_checkpoint_of_which_a_part_was_lost_is_not_given_up(stopped, out):
    only_half(stopped, out, 7)
    assert_none_serves(out, 2, ANEW, processes=2)


@pytest.mark.slow
def test_run_that_was_killed_in_its_first_save_begins_anew(stopped, out, uninterrupted):
    only_half(stopped, out, 3)
    ended = run(f"{BMUF} --resume", out)
    assert ended.stderr.splitlines()[1].startswith(f"no checkpoint in {out}: the run ")
    assert (out / FOLDER / ShardName(3, 0, 2).file_name).exists()
    assert ended.summary["resumed_at"] == []
    assert_same_end(ended, uninterrupted)


@pytest.mark.long
def test_processes_of_which_one_can_use_no_checkpoint_all_refuse(
    of_two_parts, in_two, tmp_path
):
    out = shutil.copytree(of_two_parts.out, tmp_path / "out")
    for path in (out / FOLDER).glob("*.1-of-2.npz"):
        flipped(path)
    old_files = files(out)
    (ended,) = in_two((ResumedWork(f"{BMUF} --resume", str(out)),))
    assert ended.code == 2  # of both
    assert ended.stderr.endswith(f"; no file was removed: {ANEW}\n")
    assert files(out) == old_files


@pytest.mark.slow
def test_checkpoints_alone_are_a_run_that_is_not_replaced(out):
    for path in out.glob("*.json*"):
        path.unlink()
    assert_refused(out, BMUF, f"--out {out} already holds checkpoints: use another ")


@pytest.mark.slow
def test_checkpoints_of_another_run_stay(out, uninterrupted):
    write_shard(
        out / FOLDER, load_workers(uninterrupted.out / FOLDER, 9)._replace(step=1), 0, 1
    )
    ended = run(f"{BMUF} --resume", out)
    assert find_steps(ended.out / FOLDER) == [11, 9, 7, 1]
    assert (out / FOLDER / ShardName(1, 0, 1).file_name).exists()
    assert_same_end(ended, uninterrupted)


@pytest.mark.slow
def test_record_that_is_not_as_written_is_told_and_the_one_before_serves(
    out, uninterrupted
):
    part = load_workers(out / FOLDER, 7)
    part.record["progress"].update(new=1)
    path = write_shard(out / FOLDER, part, 0, 1)
    first_line = assert_goes_on(out, uninterrupted, 6).stderr.splitlines()[0]
    assert first_line.startswith(
        f"the checkpoint of step 7 cannot be used: {path.name} is "
    )
    assert first_line.endswith("got an unexpected keyword argument 'new'")


def test_without_a_checkpoint_another_run_is_not_replaced(out):
    shutil.rmtree(out / FOLDER)
    message = "--resume: the run was made with --period 4, not 2"
    assert_refused(out, f"{BMUF} --period 2 --resume", message)


# Another run than before


REFUSED = {
    "--steps 6 --resume": (
        "the checkpoint of step 7 is after the last step, --steps 6: use --steps 7 or "
        "more"
    ),
    "--workers 4 --resume": (
        "the checkpoint of step 7 has 2 workers, not 4: --resume-center starts new "
        "replicas from its center model"
    ),
}


@pytest.mark.parametrize("flags", tiers(REFUSED, ["--workers 4 --resume"]))
def test_flags_of_another_run_are_refused_and_nothing_touched(flags, out):
    assert_refused(out, f"{BMUF} {flags}", f"--resume: {REFUSED[flags]}")


@pytest.mark.slow
def test_settings_on_which_no_number_depends_may_differ(out, stopped, uninterrupted):
    ended = run(f"{BMUF} --checkpoint-every 11 --eval-every 4 --resume", out)
    assert find_steps(out / FOLDER) == [11, 7, 6]
    assert_same_end(ended, uninterrupted)
    assert run_id(ended) == run_id(stopped) != run_id(uninterrupted)


@pytest.mark.slow
def test_longer_run_goes_on_where_the_rate_is_constant(tmp_path):
    short = run(f"{BMUF} --steps 8", tmp_path / "out").with_code(0)
    uninterrupted = run(f"{BMUF} --steps 12", tmp_path / "whole")
    assert_goes_on(short.out, uninterrupted, 8, f"{BMUF} --steps 12")


# Ends, and what they leave


def test_finished_run_that_is_resumed_says_the_same(uninterrupted, tmp_path):
    ended = assert_goes_on(
        shutil.copytree(uninterrupted.out, tmp_path / "out"), uninterrupted, 11
    )
    assert ended.lines == uninterrupted.lines
    new = ended.summary
    old = uninterrupted.summary
    assert (new["resumed_at"], old["resumed_at"]) == ([11], [])
    assert new["total_seconds"] >= old["total_seconds"]
    # Nothing was compiled.
    changing_keys = ("resumed_at", "total_seconds", "temp_bytes", "sha256")
    assert new.keys() == old.keys()
    assert all(new[name] == old[name] for name in old if name not in changing_keys)


@pytest.mark.slow
def test_signal_saves_though_no_checkpoint_was_asked(uninterrupted, tmp_path):
    command = BMUF.replace("--checkpoint-every 3", "")
    stopped_run = run(command, tmp_path / "out", signal_before(STOP))
    assert stopped_run.code == 75
    assert find_steps(stopped_run.out / FOLDER) == [7]
    assert "stopped after step 7 of 11: --resume continues" in stopped_run.stderr
    assert stopped_run.summary["stopped"] is True
    assert_goes_on(
        stopped_run.out, uninterrupted, command=f"{command} --checkpoint-every 11"
    )


@pytest.mark.slow
def test_crash_costs_what_came_after_the_last_checkpoint(uninterrupted, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(Crash):
        run(BMUF, out, crash_before(6))
    assert not (out / "summary.json").exists()
    lines = (out / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(x)["step"] for x in lines] == [4]
    assert_goes_on(out, uninterrupted, 3)


BROKEN = {
    "metrics-torn": lambda out: (out / "metrics.jsonl").write_bytes(  # as by a kill
        (out / "metrics.jsonl").read_bytes()[:-7]
    ),
    "metrics-garbage": lambda out: (out / "metrics.jsonl").write_bytes(b"\xff\x00"),
    "all-but-checkpoints-missing": lambda out: [
        path.unlink() for path in out.glob("*.json*")
    ],
}


@pytest.mark.parametrize("kind", tiers(BROKEN, ["metrics-torn"]))
def test_broken_files_are_made_good(kind, uninterrupted, tmp_path):
    """The run is done: with nothing to train, this is quick."""
    out = shutil.copytree(uninterrupted.out, tmp_path / "out")
    BROKEN[kind](out)
    ended = assert_goes_on(out, uninterrupted, 11)
    assert ended.lines == uninterrupted.lines
    assert ended.config["settings"]["resume"] is True


def test_file_of_another_is_no_export_of_a_run_that_goes_on(out, tmp_path):
    path = tmp_path / "theirs.safetensors"
    path.write_bytes(b"theirs")
    for folder in (out, tmp_path / "new"):
        command = f"{BMUF} --resume --export {path}"
        assert_refused(folder, command, f"--export {path} exists: ")


# Runs that are not to be mixed


def split(source, folder, number, step=7):
    """Puts a worker's rows of a run's step into a folder, as a part of two."""
    part = load_workers(
        source.out / FOLDER, step, lambda workers: range(number, number + 1)
    )
    write_shard(folder, part, number, 2)


@pytest.mark.long
def test_processes_that_read_parts_of_two_runs_notice(
    stopped, uninterrupted, in_two, out, tmp_path
):
    """Each one reads its own part alone."""
    other = run(BMUF, tmp_path / "again", signal_before(STOP))
    (out / FOLDER / ShardName(7, 0, 1).file_name).unlink()
    for number, source in enumerate((stopped, other)):
        split(source, out / FOLDER, number)
    (ended,) = in_two((ResumedWork(f"{BMUF} --resume", str(out)),))
    message = "the checkpoint of step 7 cannot be used: "
    assert (
        f"{message}its shard files are of different runs" in ended.stderr.splitlines()
    )
    assert ended.summary["resumed_at"] == [6]
    assert_same_end(ended, uninterrupted)


def run_id(ended):
    """The id of a run, as its last checkpoint has it."""
    return load_newest(ended).record["run_id"]


@pytest.mark.slow
def test_checkpoint_of_before_ids_and_flags_serves(uninterrupted, out):
    for step in find_steps(out / FOLDER):
        part = load_workers(out / FOLDER, step)
        del part.record["run_id"], part.record["settings"]["nesterov"]
        for name in ("run_id", "saved"):
            del part.record["progress"][name]
        write_shard(out / FOLDER, part, 0, 1)
    message = "--resume: the run was made with --nesterov False, not True"
    assert_refused(out, f"{BMUF} --nesterov --resume", message)
    assert run_id(assert_goes_on(out, uninterrupted))


# Damage


@pytest.fixture(scope="module")
def of_two_parts(in_two, tmp_path_factory):
    """A run of two processes that was stopped: each checkpoint has two files."""
    out = str(tmp_path_factory.mktemp("parts") / "out")
    (ended,) = in_two((ResumedWork(BMUF, out, STOP),))
    assert ended.code == 75, ended.stderr
    return ended


def flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage, number, processes",
    [
        (flipped, 0, 1),
        pytest.param(flipped, 1, 2, marks=pytest.mark.slow),
        pytest.param(Path.unlink, 0, 2, marks=pytest.mark.long),
    ],
)
def test_damage_is_told_and_the_checkpoint_before_serves(
    damage, number, processes, uninterrupted, request, tmp_path
):
    stopped_run = request.getfixturevalue(
        "stopped" if processes == 1 else "of_two_parts"
    )
    out = shutil.copytree(stopped_run.out, tmp_path / "out")
    name = ShardName(7, number, processes).file_name
    damage(out / FOLDER / name)
    damaged_file = {x: data for x, data in files(out / FOLDER).items() if x == name}
    ended = assert_goes_on(out, uninterrupted, 6)
    assert damaged_file.items() <= files(out / FOLDER).items()
    first_line = ended.stderr.splitlines()[0]
    assert first_line.startswith(f"the checkpoint of step 7 cannot be used: {name} is ")
