"""Studies of the command line, as real processes: files, resumption, bad requests."""

import html
import json
import re
import shlex
import shutil
import signal
import sys
from statistics import mean, stdev
from xml.etree import ElementTree

import pytest
from commands import LINE, ROOT, TIMEOUT, beneath, execute
from studies import (
    COMPARE,
    LENGTHS,
    SMALL,
    but_for_times,
    change,
    compare,
    content,
    kill,
    metrics,
    runs_done,
    said_in_one_line,
    study_in_background,
    table,
    wait_until,
)

from experiments.compare import main
from experiments.study.running.make import cleaned
from experiments.study.running.maker import unfinished
from experiments.training import records

FILES = {"study.json", "metrics.jsonl", "finals.jsonl", "table.md", "table.csv"}
FILES |= {"report.html"}
OF_THE_RUN = {
    "step",
    "divergence",
    "pseudo_gradient",
    "displacement_cosine",
    "drift",
} | LINE
PNG = b"\x89PNG\r\n\x1a\n"
# One algorithm, one seed: the shortest study that is none of the above.
SHORT = "--algos sync_sgd --seeds 1 --steps 16 --eval-every 8 --step-time 0.001"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A finished study, not to be changed."""
    ended = compare(SMALL, tmp_path_factory.mktemp("small") / "study")
    assert ended.code == 0, ended.stderr
    return ended


@pytest.fixture
def copy(small, tmp_path):
    """A copy of the finished study's folder."""
    return shutil.copytree(small.out, tmp_path / "copy")


@pytest.fixture
def here(capsys, monkeypatch):
    """Runs a command line in this process: (exit code, stdout, stderr)."""
    monkeypatch.chdir(ROOT)

    def run(command, out):
        code = main([*shlex.split(command), "--out", str(out)])
        return code, *capsys.readouterr()

    return run


def test_a_study_leaves_its_runs_and_a_report_and_nothing_else(small):
    assert {path.name for path in small.out.iterdir()} == FILES | {"runs", "figures"}
    assert len(runs_done(small.out)) == 4
    for run in runs_done(small.out):
        names = {"config.json", "metrics.jsonl", "summary.json"}
        assert {path.name for path in run.iterdir()} == names
        assert [path.name for path in run.parent.glob(".*")] == []


def test_every_figure_is_there_as_svg_and_png_and_in_the_report(small):
    figures = small.out / "figures"
    names = {path.stem for path in figures.iterdir()}
    assert {path.name for path in figures.iterdir()} == {
        f"{name}.{kind}" for name in names for kind in ("svg", "png")
    }
    for of in ("loss", "accuracy"):
        for by in ("steps", "bytes", "time-10gbe", "time-dsl"):
            assert f"test-{of}-by-{by}" in names
    assert {"train-loss-by-steps", "drift-by-steps"} <= names
    # At both evaluations the replicas have just agreed: there is nothing to see.
    assert "divergence-by-steps" not in names
    for name in names:
        assert (figures / f"{name}.png").read_bytes().startswith(PNG)
        root = ElementTree.fromstring((figures / f"{name}.svg").read_bytes())
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
    page = (small.out / "report.html").read_text("utf-8")
    assert page.count("<figure>") == len(names)


def test_lines_of_all_runs_are_valid_json_and_say_what_they_are_of(small):
    lines = metrics(small.out)  # refuses NaN and Infinity
    about = [(x["label"], x["algo"], x["seed"], x["step"]) for x in lines]
    assert about == [
        (label, algo, seed, step)
        for label, algo in (("sync_sgd", "sync_sgd"), ("NBM", "bmuf"))
        for seed in (0, 1)
        for step in (16, 32)
    ]
    assert all(set(line) >= OF_THE_RUN for line in lines)


def test_metrics_load_in_pandas_in_one_line(small):
    pandas = pytest.importorskip("pandas")
    frame = pandas.read_json(small.out / "metrics.jsonl", lines=True)
    assert len(frame) == 8
    last = frame[frame.step == 32].groupby("label").test_accuracy.mean()
    expected = float(table(small.out)["NBM"]["test_accuracy_mean"])
    assert last["NBM"] == pytest.approx(expected)


@pytest.mark.slow
def test_finals_have_a_line_for_each_run_as_its_summary_says(tuned):
    lines = (tuned.out / "finals.jsonl").read_text().splitlines()
    finals = [json.loads(line) for line in lines]
    runs = runs_done(tuned.out)
    assert len(finals) == len(runs)
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    for key in ("seed", "lr", "test_loss", "test_accuracy", "diverged"):
        expected = sorted(summary[key] for summary in summaries)
        assert sorted(line[key] for line in finals) == expected
    config = json.loads((runs[0] / "config.json").read_text())
    assert [line["versions"] for line in finals if "versions" in line] == [
        config["versions"]
    ]
    tried = [line for line in finals if not line["reported"]]
    assert {line["seed"] for line in tried} == {1000}
    assert len(tried) == sum("tuning" in run.parts for run in runs)


def test_the_table_has_the_means_of_the_runs_summaries(small):
    found = table(small.out)
    by_label: dict[str, list] = {"sync_sgd": [], "NBM": []}
    for run in runs_done(small.out):
        summary = json.loads((run / "summary.json").read_text())
        by_label["NBM" if summary["algo"] == "bmuf" else "sync_sgd"].append(summary)
    assert list(found) == list(by_label)
    for label, summaries in by_label.items():
        line = found[label]
        for key in ("test_accuracy", "test_loss"):
            values = [s[key] for s in summaries]
            assert float(line[f"{key}_mean"]) == pytest.approx(mean(values))
            assert float(line[f"{key}_sd"]) == pytest.approx(stdev(values))
        assert (line["seeds"], line["diverged"]) == ("2", "0")
        assert float(line["bytes_per_worker"]) == summaries[0]["bytes_per_worker"]
    new, old = by_label["NBM"], by_label["sync_sgd"]
    pairs = zip(new, old, strict=True)
    differences = [a["test_accuracy"] - b["test_accuracy"] for a, b in pairs]
    line = found["NBM"]
    assert float(line["difference_mean"]) == pytest.approx(mean(differences))
    assert float(line["difference_sd"]) == pytest.approx(stdev(differences))
    assert found["sync_sgd"]["difference_mean"] == ""  # the baseline


def test_modelled_time_is_steps_of_the_given_length_and_what_is_sent(small):
    found = table(small.out)["NBM"]
    arrays, syncs, hops = 6, 4, 2 * 7  # a ring of 8 workers
    sent = float(found["bytes_per_worker"])
    for name, bandwidth, latency in (
        ("10gbe", 10e9 / 8, 24e-6),
        ("dsl", 1.225e6, 49e-3),
    ):
        expected = 32 * 0.001 + sent / bandwidth + syncs * arrays * hops * latency
        assert float(found[f"seconds: {name}"]) == pytest.approx(expected)


def test_stdout_answers_and_stderr_has_a_line_a_run_with_the_time_left(small):
    assert small.stdout.splitlines()[0] == "sync_sgd and NBM on digits"
    for label, line in table(small.out).items():
        figures = (100 * float(line[f"test_accuracy_{x}"]) for x in ("mean", "sd"))
        shown = " ± ".join(f"{x:.2f}" for x in figures)
        assert re.search(rf"^{label} +{re.escape(shown)} %", small.stdout, re.M)
    assert "2 seeds: too few for an interval" in small.stdout
    assert small.stdout.splitlines()[-1] == f"report: {small.out / 'report.html'}"
    assert not set("\x1b\r") & set(small.stderr)
    first, *lines = small.stderr.splitlines()
    assert first == "4 runs to make"
    runs = ["sync_sgd, seed 0", "sync_sgd, seed 1", "NBM, seed 0", "NBM, seed 1"]
    assert len(lines) == len(runs)
    for i, (line, name) in enumerate(zip(lines, runs, strict=True), 1):
        assert line.startswith(f"run {i}/4 {name}: ")
        left = re.search(r"about ([\d.]+) (ms|s|min|h) left$", line)
        digits = left and left[1].replace(".", "").rstrip("0")
        assert len(digits or "") <= 2 and (left or i == 4)


def test_help_names_the_flags_without_importing_jax(tmp_path):
    watched = [sys.executable, "-X", "importtime", "-m", "experiments.compare"]
    ended = execute("--help-all", tmp_path, watched)
    assert ended.code == 0
    imported = {x.rpartition("|")[2].strip() for x in ended.stderr.splitlines()}
    assert "experiments.study.config" in imported
    assert not {"jax", "optax", "sklearn", "scipy", "matplotlib"} & imported
    for flag in ("algos", "preset", "seeds", "sweep", "tune", "network", "step-time"):
        assert re.search(rf"^  --{flag}\b", ended.stdout, re.M)


def stated(ended, label):
    """The command that the report states for the runs of an algorithm."""
    command = table(ended.out)[label]["command"]
    page = html.unescape((ended.out / "report.html").read_text("utf-8"))
    assert f"<pre>{command}</pre>" in page
    return command.removeprefix("python -m experiments.run ")


@pytest.mark.slow
@pytest.mark.parametrize(
    "label, seed",
    [("sync_sgd", 0), ("sync_sgd", 1), ("NBM", 0), ("NBM", 1)],
)
def test_the_command_of_a_run_makes_the_same_params(small, label, seed, tmp_path):
    alone = execute(f"{stated(small, label)} --seed {seed}", tmp_path / "alone")
    assert alone.code == 0
    algo = {"sync_sgd": "sync_sgd", "NBM": "bmuf"}[label]
    summaries = [
        json.loads((r / "summary.json").read_text()) for r in runs_done(small.out)
    ]
    (same,) = [s for s in summaries if (s["algo"], s["seed"]) == (algo, seed)]
    assert alone.summary["params_sha256"] == same["params_sha256"]
    expected = [
        x for x in metrics(small.out) if (x["label"], x["seed"]) == (label, seed)
    ]
    assert [x["test_loss"] for x in alone.lines] == [x["test_loss"] for x in expected]


@pytest.mark.sample(0, slow=1)
@pytest.mark.parametrize("name", ["sparta", "quantized_sgd"])
def test_a_run_that_draws_while_it_trains_is_the_same_alone(name, tmp_path):
    ended = compare(f"--algos {name} --seeds 2 {LENGTHS}", tmp_path / "study")
    assert ended.code == 0, ended.stderr
    alone = execute(f"{stated(ended, name)} --seed 1", tmp_path / "alone")
    (run,) = ended.out.glob(f"runs/*-{name.replace('_', '-')}/runs/seed-1")
    summary = json.loads((run / "summary.json").read_text())
    assert alone.summary["params_sha256"] == summary["params_sha256"]


@pytest.mark.slow
def test_a_killed_study_goes_on_and_gives_the_same_report(small, tmp_path):
    out = tmp_path / "study"
    with study_in_background(SMALL, out) as process:
        wait_until(process, lambda: runs_done(out))
        kill(process)
    done = runs_done(out)
    assert 1 <= len(done) < 4
    assert not (out / "report.html").exists()
    before = {path: content(path) for path in done}
    again = compare(SMALL, out)
    assert again.code == 0, again.stderr
    first, *lines = again.stderr.splitlines()
    assert first == f"{len(done)} of 4 runs are already complete"
    made = [line for line in lines if line.startswith("run ")]
    assert len(made) == 4 - len(done)
    assert {path: content(path) for path in done} == before
    assert but_for_times(out) == but_for_times(small.out)
    assert list(out.rglob(".seed-*")) == []
    assert [path for path in out.rglob("*") if path.name.endswith(".tmp")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), (signal.SIGTERM, 75)],
    ids=str,
)
def test_a_signal_stops_a_study_and_no_run_is_half_made(number, code, tmp_path):
    lengths = "--steps 1000000 --dispatch-steps 16 --eval-every 16"
    out = tmp_path / "study"

    def begun():
        return any(path.stat().st_size for path in beneath(out, "metrics.jsonl"))

    with study_in_background(f"--algos sync_sgd {lengths}", out) as process:
        wait_until(process, begun)
        process.send_signal(number)
        assert process.wait(TIMEOUT) == code
    stderr = (tmp_path / "stderr").read_text("utf-8")
    assert "stopped after 0 of 5 runs" in stderr
    assert "Traceback" not in stderr
    assert list(out.rglob("seed-*")) == []
    assert not (out / "report.html").exists()


@pytest.mark.slow
def test_more_seeds_later_make_the_new_runs_only(small, copy):
    before = content(copy / "runs")
    ended = compare(SMALL.replace("--seeds 2", "--seeds 3"), copy)
    assert ended.code == 0, ended.stderr
    first, *runs = ended.stderr.splitlines()
    assert first == "4 of 6 runs are already complete"
    made = [line.partition(":")[0] for line in runs]
    assert made == ["run 5/6 sync_sgd, seed 2", "run 6/6 NBM, seed 2"]
    assert before.items() <= content(copy / "runs").items()
    assert {line["seeds"] for line in table(copy).values()} == {"3"}


def test_a_run_is_made_beside_files_of_the_user(tmp_path):
    folder = tmp_path / "runs" / "bmuf" / "seed-0"
    folder.mkdir(parents=True)
    (folder / "notes.md").write_text("mine")
    (folder / "metrics.jsonl").write_text("half of it")
    made = dict.fromkeys(("config.json", "metrics.jsonl", "summary.json"), '{"new": 1}')
    with unfinished(folder) as place:
        place.mkdir()
        for name, text in made.items():
            (place / name).write_text(text)
    found = {x.name: x.read_text() for x in folder.iterdir()}
    assert found == {**made, "notes.md": "mine"}
    assert [*folder.parent.iterdir()] == [folder]


def test_only_folders_of_killed_runs_are_cleaned_away(tmp_path):
    kinds = tmp_path / "runs" / "bmuf", tmp_path / "tuning" / "bmuf" / "lr=1"
    ours = [folder / ".seed-0-0123abcd" for folder in kinds]
    theirs = [tmp_path / "data" / "raw" / ".seed-list", kinds[0] / ".seed-notes"]
    for folder in (*ours, *theirs):
        folder.mkdir(parents=True)
    with cleaned(tmp_path):
        pass
    assert [x.exists() for x in (*ours, *theirs)] == [False, False, True, True]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "flags, shown",
    [
        ("--network '100Mbit/s, 20ms'", "100 Mbit/s, 20 ms"),
        ("--target 0.6", "60 %"),
        ("--baseline NBM", "against NBM"),
        ("--measure test_loss", "test loss"),
    ],
)
def test_a_flag_of_the_report_alone_makes_no_run(flags, shown, copy, here):
    runs, study = content(copy / "runs"), (copy / "study.json").read_bytes()
    before = (copy / "table.csv").read_bytes()
    code, _, stderr = here(f"{SMALL} {flags}", copy)
    assert (code, stderr) == (0, "4 of 4 runs are already complete\n")
    assert content(copy / "runs") == runs
    assert (copy / "study.json").read_bytes() == study
    assert (copy / "table.csv").read_bytes() != before
    assert shown in (copy / "table.md").read_text("utf-8")
    page = html.unescape((copy / "report.html").read_text("utf-8"))
    assert shlex.split(flags)[0] in page  # in the command that repeats it


@pytest.mark.parametrize(
    "command, shown",
    [
        (SMALL.replace("--steps 32", "--steps 48"), ["48", "32"]),
        (SMALL.replace("NBM=", "Other="), ["Other", "NBM"]),
        (f"{SMALL} --lr 0.1", ["--lr"]),
        (f"{SMALL} --sweep workers=1,2", ["workers"]),
        (f"{SMALL} --tune lr=0.1,0.2", ["tune"]),
        (f"{SMALL} --worker-batch 4", ["worker_batch"]),
    ],
)
def test_a_folder_of_other_settings_is_refused(command, shown, copy, here):
    before = content(copy)
    code, stdout, stderr = here(command, copy)
    assert (code, stdout) == (2, "")
    error = said_in_one_line(stderr)
    for text in ["other settings", str(copy), *shown]:
        assert text in error
    assert content(copy) == before


@pytest.mark.parametrize("package", ["syncalgos", "jax", "numpy"])
def test_a_folder_of_another_version_is_refused(package, copy, here):
    study = json.loads((copy / "study.json").read_text())
    study["versions"][package] = "0.0.1"
    records.write_json(copy / "study.json", study)
    before = content(copy)
    code, _, stderr = here(SMALL, copy)
    assert code == 2
    error = said_in_one_line(stderr)
    assert "other versions" in error and f"{package}: '0.0.1'" in error
    assert content(copy) == before


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "3"])
def test_a_folder_whose_settings_cannot_be_read_is_refused(text, copy, here):
    (copy / "study.json").write_text(text)
    before = content(copy)
    code, _, stderr = here(SMALL, copy)
    assert code == 2
    assert "study.json" in said_in_one_line(stderr)
    assert content(copy) == before


def test_a_folder_with_something_else_is_refused(tmp_path, here):
    (tmp_path / "thesis.tex").write_text("all of it")
    code, _, stderr = here(SHORT, tmp_path)
    assert code == 2
    assert "holds other files" in said_in_one_line(stderr)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_a_diverged_algorithm_is_shown_and_counted(tmp_path):
    command = f"--algos 'fine=sync_sgd, boom=sync_sgd --lr 1e9' --seeds 2 {LENGTHS}"
    ended = compare(command, tmp_path / "study")
    assert ended.code == 0, ended.stderr
    for seed in (0, 1):
        assert re.search(rf"boom, seed {seed}: diverged at step \d", ended.stderr)
    line = table(ended.out)["boom"]
    assert (line["seeds"], line["diverged"]) == ("2", "2")
    assert line["test_accuracy_mean"] == line["test_loss_mean"] == ""
    assert table(ended.out)["fine"]["diverged"] == "0"
    assert re.search(r"^boom +all diverged .* 2$", ended.stdout, re.M)
    page = (ended.out / "report.html").read_text("utf-8")
    for text in (page, (ended.out / "table.md").read_text("utf-8"), ended.stdout):
        assert "boom diverged in 2 of 2 runs" in " ".join(text.split())  # some no-break
    row, times = re.findall(r"<tr>(?:(?!</tr>).)*boom.*?</tr>", page, re.S)
    assert "–" in times
    assert "all diverged" in row and "2 diverged" in row
    # A run that ended early has sent less: that is no merit.
    assert "boom sends least" not in ended.stdout
    assert len([x for x in metrics(ended.out) if x["label"] == "boom"]) >= 2


@pytest.mark.slow
def test_a_run_whose_last_step_blows_up_does_not_end_the_study(copy, here):
    """Its losses were finite, what is measured afterwards is not: null in the files."""
    (run,) = copy.glob("runs/02-NBM/runs/seed-1")
    change(run, test_loss=None)
    code, _, stderr = here(SMALL, copy)
    assert code == 0, stderr
    kept = json.loads((run.with_name("seed-0") / "summary.json").read_text())
    found = float(table(copy)["NBM"]["test_loss_mean"])
    assert found == pytest.approx(kept["test_loss"])


@pytest.mark.slow
def test_a_report_that_does_not_fit_is_one_line_and_the_command_goes_on(
    small, copy, here
):
    for name in ("report.html", "table.csv", "table.md"):
        (copy / name).unlink()
    runs = content(copy / "runs")
    full = compare(SMALL, copy, limit=8)
    assert (full.code, full.stdout) == (75, "")
    assert "File too large" in said_in_one_line(full.stderr)
    assert len(full.stderr.splitlines()) == 2  # the runs that are there, the error
    assert not (copy / "report.html").exists()
    assert [path for path in copy.rglob("*") if path.name.endswith(".tmp")] == []
    assert here(SMALL, copy)[0] == 0
    assert content(copy / "runs") == runs
    assert but_for_times(copy) == but_for_times(small.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["report.html", "metrics.jsonl", "figures/test-loss-by-steps.png"]
)
@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's own")
def test_a_disk_without_space_leaves_the_old_report(name, small, copy, here):
    path = copy / name
    before = path.read_bytes()
    path.with_name(f".{path.name}.tmp").symlink_to("/dev/full")  # what is written first
    code, stdout, stderr = here(SMALL, copy)
    assert (code, stdout) == (75, "")
    assert "No space left on device" in said_in_one_line(stderr)
    assert path.read_bytes() == before
    assert here(SMALL, copy)[0] == 0
    assert but_for_times(copy) == but_for_times(small.out)


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_one_line_and_the_command_goes_on(tmp_path):
    out = tmp_path / "study"
    full = compare(SHORT, out, limit=1)  # study.json fits, a run's config.json does not
    assert (full.code, full.stdout) == (75, "")
    assert "File too large" in said_in_one_line(full.stderr)
    assert runs_done(out) == []
    again = compare(SHORT, out)
    assert again.code == 0, again.stderr
    assert len(runs_done(out)) == 1
    assert list(out.rglob(".seed-*")) == []


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A finished study whose learning rate was tuned."""
    out = tmp_path_factory.mktemp("tuned") / "study"
    ended = compare(f"{SHORT} --tune lr=0.01:0.1:log:3", out)
    assert ended.code == 0, ended.stderr
    return ended


def trials(out):
    """The summaries of tuning runs by the learning rate that they tried."""
    files = list(out.glob("tuning/01-sync-sgd/runs/*/seed-*/summary.json"))
    return {s["lr"]: s for s in (json.loads(path.read_text()) for path in files)}


@pytest.mark.slow
def test_the_value_chosen_is_that_of_the_best_validation_figure(tuned):
    tried = trials(tuned.out)
    assert sorted(tried) == [0.01, 0.0316, 0.1]
    assert all(s["validation"] == 0.1 for s in tried.values())
    assert all(s["seed"] not in range(100) for s in tried.values())  # of no report
    best = max(tried, key=lambda lr: tried[lr]["test_accuracy"])
    line = table(tuned.out)["sync_sgd"]
    assert float(line["tuned_lr"]) == float(line["lr"]) == best
    assert f" --lr {best:g} " in line["command"]
    assert "--validation" not in line["command"]
    (run,) = [x for x in runs_done(tuned.out) if "tuning" not in x.parts]
    config = json.loads((run / "config.json").read_text())
    assert (config["lr"], config["validation"]) == (best, None)
    edge = f"the best --lr, {best:g}, is at the edge of what was tried"
    assert (edge in tuned.stdout) == (best != 0.0316)
    assert "tuned for each algorithm by 3 trials of 1 seed" in tuned.stdout
    assert len([x for x in tuned.stderr.splitlines() if x.startswith("run ")]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("lr, edge", [("0.01", True), ("0.0316", False)])
def test_another_measure_that_chooses_another_value_is_not_told_of_old_runs(
    lr, edge, tuned, tmp_path
):
    out = shutil.copytree(tuned.out, tmp_path / "copy")
    (path,) = out.glob(f"tuning/*/runs/lr={lr}/seed-*/summary.json")
    change(path.parent, test_loss=0.001)
    ended = compare(f"{SHORT} --tune lr=0.01:0.1:log:3 --measure test_loss", out)
    assert ended.code in (0, 2)
    if ended.code == 2:
        assert "measure" in said_in_one_line(ended.stderr)
        return
    line = table(out)["sync_sgd"]
    assert line["lr"] == line["tuned_lr"] == lr
    assert f" --lr {lr} " in line["command"]
    assert ("at the edge" in ended.stdout) == edge


# What a study measures is looked for before its runs; tests/cli has the other requests.
BAD = {
    "--target 5": ["--target 5", "at most 1"],
    "--measure test_accuracy --target 1.5": ["--target 1.5", "at most 1"],
    "--measure nope": ["'nope'", "test_accuracy", "test_loss"],
    "--task tiny_tasks:poisoned --measure test_accuracy": [
        "test_accuracy",
        "test_loss",
    ],
}


@pytest.mark.parametrize("command", BAD)
def test_a_bad_request_is_one_line_and_nothing_is_written(
    command, tmp_path, here, monkeypatch
):
    def make(*arguments):
        raise KeyboardInterrupt  # a run was begun: it would end with 130

    monkeypatch.setattr("experiments.study.running.maker.Maker.make", make)
    code, stdout, stderr = here(command, tmp_path / "study")
    assert (code, stdout) == (2, "")
    assert len(stderr.splitlines()) == 1
    error = said_in_one_line(stderr)
    for text in BAD[command]:
        assert text in error
    assert list(tmp_path.iterdir()) == []


def test_a_corrected_command_may_use_the_same_folder(tmp_path, here, monkeypatch):
    def make(*arguments):
        raise KeyboardInterrupt  # a run was begun

    monkeypatch.setattr("experiments.study.running.maker.Maker.make", make)
    assert here(f"{SHORT} --lr -1", tmp_path / "study")[0] == 2
    assert here(f"{SHORT} --lr 0.1", tmp_path / "study")[0] == 130


def test_a_measure_that_the_runs_lack_keeps_runs_and_report(copy, here):
    before = content(copy)
    code, stdout, stderr = here(f"{SMALL} --measure test_accurcy", copy)
    assert (code, stdout) == (2, "")
    error = said_in_one_line(stderr)
    assert "'test_accurcy'" in error and "'test_accuracy'" in error
    assert content(copy) == before


def test_bad_requests_of_a_real_process_exit_with_2(tmp_path):
    ended = execute("--algos sync_sgd --seeds 0", tmp_path / "study", COMPARE)
    assert (ended.code, ended.stdout) == (2, "")
    assert len(ended.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_sweep_keeps_the_samples_and_splits_the_lines(tmp_path):
    command = (
        "--algos sync_sgd --seeds 1 --sweep workers=2,4 --worker-batch 8 --lr 0.05 "
        "--steps 32 --eval-every 8 --step-time 0.001"
    )
    ended = compare(command, tmp_path / "study")
    assert ended.code == 0, ended.stderr
    found = {}
    for run in runs_done(ended.out):
        s = json.loads((run / "summary.json").read_text())
        found[s["workers"]] = s["batch_size"], s["steps"], s["lr"]
    assert found == {2: (16, 32, 0.05), 4: (32, 16, 0.1)}
    assert [x["workers"] for x in metrics(ended.out)] == [2] * 4 + [4] * 2
    text = (ended.out / "table.csv").read_text("utf-8").splitlines()
    assert len(text) == 3 and "workers" in text[0].split(",")
