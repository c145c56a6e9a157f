"""Studies of the command line, as real processes: files, resumption, bad requests."""

import html
import json
import re
import resource
import shlex
import shutil

import numpy as np
import pytest
from support.commands import ROOT, in_background
from support.faults import remount, small_disk
from support.study_commands import (
    LENGTHS,
    SMALL,
    but_for_times,
    compare,
    content,
    metrics,
    runs_done,
    said_in_one_line,
    table,
)

from experiments import api, files
from experiments.study.main import main
from experiments.study.making import clean_remains, open_unfinished
from experiments.study.study import _quote

FILES = "study.json metrics.jsonl finals.jsonl table.md table.csv report.html paper"
# One algorithm, one seed: the shortest study that is none of the above.
SHORT_STUDY = "--algos sync_sgd --seeds 1 --steps 16 --eval-every 8 --step-time 0.001"
TINY = "--task support.tiny_tasks:drawing --workers 2 --network dsl"
SHORT = f"{SHORT_STUDY} {TINY}"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished study, not to be changed."""
    return compare(SMALL, tmp_path_factory.mktemp("small") / "study").with_code(0)


@pytest.fixture(scope="module")
def short(tmp_path_factory):
    """The folder of the shortest study, made in this process; not to be changed."""
    out = tmp_path_factory.mktemp("short") / "study"
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        assert main([*shlex.split(SHORT), "--out", str(out)]) == 0
    return out


@pytest.fixture
def copy(small, tmp_path):
    """A copy of the finished study's folder."""
    return shutil.copytree(small.out, tmp_path / "copy")


def test_a_study_leaves_its_runs_and_a_report_and_nothing_else(short):
    assert {x.name for x in short.iterdir()} == {*FILES.split(), "runs", "figures"}
    [run] = runs_done(short)
    names = {"config.json", "metrics.jsonl", "summary.json"}
    assert {path.name for path in run.iterdir()} == names
    assert [path.name for path in run.parent.glob(".*")] == []


def test_a_shell_reads_the_words_of_the_command_as_they_were():
    for word in ("lr", "a, 'b c'=d", "'$x'", "a \"b\" 'c'", "it's"):
        assert shlex.split(_quote(word)) == [word]


@pytest.mark.slow
def test_finals_say_which_examples_each_model_is_right_on(tmp_path, run_study):
    words = "--algos sync_sgd,bmuf --tune lr=0.05,0.1 --steps 16 --eval-every 16"
    assert run_study(f"{words} --seeds 2")[0] == 0
    lines = (tmp_path / "study" / "finals.jsonl").read_text().splitlines()
    reported_lines = [x for x in map(json.loads, lines) if x["reported"]]
    assert len(reported_lines) == 4 < len(lines)
    for line in reported_lines:
        bits = np.unpackbits(np.frombuffer(bytes.fromhex(line["correct"]), np.uint8))
        assert bits[:359].mean() == pytest.approx(line["test_accuracy"])
        assert not bits[359:].any()


@pytest.mark.slow
def test_stdout_answers_and_stderr_has_a_line_a_run_with_the_time_left(small):
    for label, line in table(small.out).items():
        mean = 100 * float(line["test_accuracy_mean"])
        assert re.search(rf"^{label} +{mean:.2f} ± ", small.stdout, re.M)
    assert small.stdout.splitlines()[-1] == f"report: {small.out / 'report.html'}"
    assert not set("\x1b\r") & set(small.stderr)
    heading, *lines = small.stderr.splitlines()
    assert heading == "4 runs"
    runs = ["sync_sgd, seed 0", "sync_sgd, seed 1", "NBM, seed 0", "NBM, seed 1"]
    assert len(lines) == len(runs)
    for i, (line, name) in enumerate(zip(lines, runs, strict=True), 1):
        assert line.startswith(f"run {i}/4 {name}: ")
        time_left = re.search(r"about ([\d.]+) (ms|s|min|h) left$", line)
        digits = time_left and time_left[1].replace(".", "").rstrip("0")
        assert len(digits or "") <= 2 and (time_left or i == 4)


@pytest.mark.slow
def test_a_killed_study_goes_on_and_gives_the_same_report(small, tmp_path):
    out = tmp_path / "study"
    with in_background(SMALL, out, "experiments.compare") as (process, wait_for):
        wait_for("run 1/4")
        process.kill()
        process.wait()
    complete_runs = runs_done(out)
    assert 1 <= len(complete_runs) < 4
    assert not (out / "report.html").exists()
    contents = {path: content(path) for path in complete_runs}
    again = compare(SMALL, out).with_code(0)
    heading, *lines = again.stderr.splitlines()
    assert heading == f"{len(complete_runs)} of 4 runs are already complete"
    assert sum(line.startswith("run ") for line in lines) == 4 - len(complete_runs)
    assert {path: content(path) for path in complete_runs} == contents
    assert but_for_times(out) == but_for_times(small.out)
    assert list(out.rglob(".seed-*")) == []
    assert [path for path in out.rglob("*") if path.name.endswith(".tmp")] == []


@pytest.mark.slow
def test_the_same_command_makes_a_damaged_run_anew(copy, run_study):
    (run,) = copy.glob("runs/02-NBM/runs/seed-1")
    other_files = {
        k: x for k, x in content(copy / "runs").items() if run not in k.parents
    }
    params_hash = json.loads((run / "summary.json").read_text())["params_sha256"]
    (run / "metrics.jsonl").write_bytes(b"")
    code, _, stderr = run_study(SMALL, copy)
    assert code == 0, stderr
    assert f"{run}/summary.json: {files.CHANGED}: the run is repeated" in stderr
    assert (
        json.loads((run / "summary.json").read_text())["params_sha256"] == params_hash
    )
    assert other_files.items() <= content(copy / "runs").items()


@pytest.mark.slow
def test_more_seeds_later_make_the_new_runs_only(copy, run_study):
    old_files = content(copy / "runs")
    code, _, stderr = run_study(SMALL.replace("--seeds 2", "--seeds 3"), copy)
    assert code == 0, stderr
    heading, *runs = stderr.splitlines()
    assert heading == "4 of 6 runs are already complete"
    new_runs = [line.partition(":")[0] for line in runs]
    assert new_runs == ["run 5/6 sync_sgd, seed 2", "run 6/6 NBM, seed 2"]
    assert old_files.items() <= content(copy / "runs").items()
    assert {line["seeds"] for line in table(copy).values()} == {"3"}


def test_a_run_is_made_beside_files_of_the_user(tmp_path):
    folder = tmp_path / "runs" / "bmuf" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")
    (folder / "metrics.jsonl").write_text("half of it")
    new_files = dict.fromkeys(
        ("config.json", "metrics.jsonl", "summary.json"), '{"new": 1}'
    )
    with open_unfinished(folder) as place:
        place.mkdir()
        for name, text in new_files.items():
            (place / name).write_text(text)
    files_by_name = {x.name: x.read_text() for x in folder.iterdir()}
    assert files_by_name == {**new_files, "notes.md": "mine"}
    assert [*folder.parent.iterdir()] == [folder]


def test_only_folders_of_killed_runs_are_cleaned_away(tmp_path):
    kinds = tmp_path / "runs" / "bmuf", tmp_path / "tuning" / "bmuf" / "lr=1"
    ours = [folder / ".seed-0-0123abcd" for folder in kinds]
    theirs = [tmp_path / "data" / "raw" / ".seed-list", kinds[0] / ".seed-notes"]
    for folder in (*ours, *theirs):
        folder.mkdir(parents=True)
    with clean_remains(tmp_path):
        pass
    assert [x.exists() for x in (*ours, *theirs)] == [False, False, True, True]


@pytest.mark.slow
def test_flags_of_the_report_alone_make_no_run(copy, run_study):
    flags = (
        "--network '100Mbit/s, 20ms' --target 2.5 --baseline NBM --measure test_loss"
    )
    runs = content(copy / "runs")
    study = (copy / "study.json").read_bytes()
    code, _, stderr = run_study(f"{SMALL} {flags}", copy)
    assert (code, stderr) == (0, "4 of 4 runs are already complete\n")
    assert content(copy / "runs") == runs
    assert (copy / "study.json").read_bytes() == study
    text = (copy / "table.md").read_text("utf-8")
    for words in ("100 Mbit/s, 20 ms", "2.5", "against NBM", "test loss"):
        assert words in text
    page = html.unescape((copy / "report.html").read_text("utf-8"))
    assert flags.partition(" '")[0] in page  # in the command that repeats it


def of_another_version(folder):
    """Makes a study one of another version of numpy."""
    study = json.loads((folder / "study.json").read_text())
    study["versions"]["numpy"] = "0.0.1"
    files.write_json(folder / "study.json", study)


def of_other_files(folder):
    """Makes a study's folder one of a user's own."""
    (folder / "study.json").unlink()


TWO = "sync_sgd, NBM=bmuf --nesterov"
OTHER_ALGORITHMS = f"(algorithms: sync_sgd; now: {TWO}): use another folder"
UNUSABLE = {
    "other settings": (SHORT.replace("sync_sgd", f"'{TWO}'"), None, [OTHER_ALGORITHMS]),
    "settings (flags: --": (SHORT.replace("16", "48"), None, ["s 16", "now:", "s 48"]),
    "other versions": (SHORT, of_another_version, ["numpy: 0.0.1; now: "]),
    "holds other files": (SHORT, of_other_files, ["use another folder"]),
    "'test_accurcy'": (f"{SHORT} --measure test_accurcy", None, ["'test_accuracy'"]),
}


@pytest.mark.parametrize("why", UNUSABLE)
def test_what_a_study_cannot_use_is_kept(why, short, tmp_path, run_study):
    command, change, words = UNUSABLE[why]
    copy = shutil.copytree(short, tmp_path / "copy")
    if change:
        change(copy)
    old_files = content(copy)
    code, stdout, stderr = run_study(command, copy)
    assert (code, stdout) == (2, "")
    error = said_in_one_line(stderr)
    assert [text for text in (why, *words) if text not in error] == []
    assert content(copy) == old_files


@pytest.mark.slow
def test_a_diverged_algorithm_is_shown_and_counted(run_study, tmp_path):
    command = f"--algos 'fine=sync_sgd, boom=sync_sgd --lr 1e9' --seeds 2 {LENGTHS}"
    out = tmp_path / "study"
    code, _, stderr = run_study(f"{command} {TINY}", out)
    assert code == 0, stderr
    for seed in (0, 1):
        assert re.search(rf"boom, seed {seed}: diverged at step \d", stderr)
    rows = table(out)
    assert [rows[x]["diverged"] for x in ("fine", "boom")] == ["0", "2"]
    assert rows["boom"]["test_accuracy_mean"] == ""
    assert len([x for x in metrics(out) if x["label"] == "boom"]) >= 2


@pytest.mark.slow
def test_a_report_that_cannot_be_written_is_told_and_the_old_one_stays(
    small, copy, run_study
):
    path = copy / "report.html"
    old_report = path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(old_report) // 2, limits[1]))
    try:
        code, stdout, stderr = run_study(SMALL, copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == 1 and "report:" not in stdout and "sync_sgd" in stdout
    assert re.search(rf"{copy}/\S+: File too large", said_in_one_line(stderr))
    assert path.read_bytes() == old_report
    assert run_study(SMALL, copy)[0] == 0
    assert but_for_times(copy) == but_for_times(small.out)


@pytest.mark.slow
def test_a_finished_study_in_a_read_only_folder_is_reported(small, run_study, tmp_path):
    with small_disk(tmp_path / "disk", "16m") as disk:
        out = shutil.copytree(small.out, disk / "study")
        remount(disk, "ro")
        code, stdout, stderr = run_study(SMALL, out)
        assert code == 1 and "sync_sgd" in stdout and "report:" not in stdout
        assert "Read-only file system" in said_in_one_line(stderr)
        flags = {"period": 8, "steps": 32, "eval-every": 16, "step-time": 0.001}
        algos = {"sync_sgd": "sync_sgd", "NBM": "bmuf --nesterov"}
        study = api.compare(algos, seeds=2, flags={"out": out, **flags})
        assert study.report(tmp_path / "elsewhere").exists()
        code, _, stderr = run_study(SMALL.replace("--seeds 2", "--seeds 3"), out)
        assert code == 2 and "Read-only file system" in stderr


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_one_line_and_the_command_goes_on(tmp_path):
    out = tmp_path / "study"
    full = compare(
        SHORT_STUDY, out, limit=1
    )  # study.json fits, a run's config.json does not
    assert (full.code, full.stdout) == (75, "")
    assert "config.json: File too large" in said_in_one_line(full.stderr)
    assert runs_done(out) == []
    compare(SHORT_STUDY, out).with_code(0)
    assert len(runs_done(out)) == 1
    assert list(out.rglob(".seed-*")) == []
