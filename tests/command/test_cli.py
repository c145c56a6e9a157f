"""Runs of the command line, as real processes: what they write, show and leave."""

import functools
import os
import re
import shlex
import signal
import sys

import numpy as np
import pytest
from support import resumed_runs
from support.commands import (
    BASE,
    LINE,
    PARAMS_BYTES,
    PROGRAM,
    ROOT,
    SUMMARY,
    TIMEOUT,
    EndedRun,
    execute,
    on_a_terminal,
    run_program,
)

from experiments.data import sampling
from experiments.training.config import parse
from experiments.training.prepare import prepare
from experiments.training.summary import params_sha256
from syncalgos import ALGORITHMS

UNEVEN = f"{BASE} --algo model_averaging --period 5 --workers 2"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Makes each run once: the first one as a user does, the others in this process."""

    @functools.cache
    def make_run(command):
        make = execute if command == BASE else resumed_runs.run
        return make(command, tmp_path_factory.mktemp("run") / "out")

    return make_run


@pytest.mark.slow
def test_default_run_learns_digits(tmp_path):
    words = [*PROGRAM, "--algo", "bmuf"]
    ended = run_program(words, tmp_path, PYTHONPATH=ROOT, JAX_NUM_CPU_DEVICES=None)
    assert ended.returncode == 0
    (out,) = (tmp_path / "runs").iterdir()
    summary = EndedRun(0, "", "", out).summary
    assert summary["test_accuracy"] >= 0.93
    assert not summary["diverged"]
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    divisors = [n for n in (1, 2, 4, 8) if n <= (cores or 1)]
    assert summary["devices"] == divisors[-1]


def test_summary_is_shown_on_stdout_and_progress_in_plain_lines_on_stderr(run):
    ended = run(BASE)
    summary = ended.summary
    for label, figure in {
        "train loss": f"{summary['train_loss']:.4f}",
        "test loss": f"{summary['test_loss']:.4f}",
        "test accuracy": f"{summary['test_accuracy']:.4f}",
        "learning rate": "0.05 nominal, 0.4 effective",  # lr / (1 - 7/8)
        "most a worker sent": "365.7 kB in 2 syncs",  # 2 · 2 · 7/8 · PARAMS_BYTES
        "speed": "steps/s",
        "files": str(ended.out),
    }.items():
        assert re.search(rf"{label} +.*{re.escape(figure)}", ended.stdout)
    assert not set("\x1b\r") & set(ended.stderr)
    *header, first_line, second_line = ended.stderr.splitlines()
    assert "bmuf on digits: 32 steps, batch 64 (8 per worker), seed 0" in header
    assert "8 workers on 2 cpu devices × 4 lanes" in "".join(header)
    assert first_line.startswith("step 16/32") and second_line.startswith("step 32/32")


@pytest.mark.parametrize(
    "command, workers, syncs",  # syncs after step 16 and after step 32
    [(BASE, 8, [1, 2]), pytest.param(UNEVEN, 2, [3, 6], marks=pytest.mark.slow)],
)
def test_files_agree_with_each_other_and_with_theory(run, command, workers, syncs):
    ended = run(command)
    assert ended.code == 0
    config = ended.config
    lines = ended.lines
    summary = ended.summary
    assert {path.name for path in ended.out.iterdir()} == {
        "config.json",
        "metrics.jsonl",
        "summary.json",
    }
    assert set(summary) >= SUMMARY
    assert all(LINE | {"step", "divergence"} <= set(line) for line in lines)

    assert [line["step"] for line in lines] == [16, 32]
    sent_bytes = [line["bytes_per_worker"] for line in lines]
    assert sent_bytes == [n * PARAMS_BYTES * 2 * (workers - 1) / workers for n in syncs]
    assert summary["syncs"] == syncs[-1]
    last_figures = {
        "steps" if key == "step" else key: x for key, x in lines[-1].items()
    }
    assert last_figures.items() <= summary.items()
    assert lines[0]["seconds"] < lines[1]["seconds"] < summary["total_seconds"]

    words = shlex.split(command)
    assert config["command"][-len(words) - 2 : -2] == words
    for key in ("algo", "task", "seed", "workers", "lr", "batch_size"):
        assert config["settings"][key] == config[key] == summary[key]
    assert summary["workers"] == workers
    assert (summary["diverged"], summary["diverged_at"]) == (False, None)


@pytest.mark.slow
def test_train_loss_is_the_mean_since_the_last_line(run):
    fine = run("--steps 32 --eval-every 8").lines
    coarse = run(BASE).lines
    pairs = np.reshape([line["train_loss"] for line in fine], (2, 2))
    expected = [line["train_loss"] for line in coarse]
    np.testing.assert_allclose(pairs.mean(1), expected, rtol=1e-6)  # float32 losses


@pytest.mark.slow
def test_divergence_is_zero_right_after_a_sync_alone(run):
    divergences = [
        line["divergence"] for line in run("--steps 32 --eval-every 8").lines
    ]
    assert divergences[1] == divergences[3] == 0
    assert min(divergences[0], divergences[2]) > 0.01


@pytest.mark.slow
def test_terminal_shows_a_bar_until_ctrl_c(tmp_path):
    lengths = "--steps 1000000 --dispatch-steps 16 --eval-every 1000000"
    screen_text = b""

    def read_until(pattern):
        nonlocal screen_text
        while not re.search(pattern, screen_text.decode(errors="ignore")):
            # A bar that goes on and on is one long line, and long to search.
            screen_text = screen_text[-4096:] + os.read(
                screen, 4096
            )  # fails at its end

    with on_a_terminal(lengths, tmp_path / "out") as (process, screen):
        read_until("training.*[━╸]+.* [1-9][0-9]*/1000000")
        process.send_signal(signal.SIGINT)
        read_until("stopping after this dispatch")
        read_until("test accuracy")
        read_until("stopped after step")
        assert process.wait(TIMEOUT) == 130
    os.close(screen)
    assert 0 < EndedRun(130, "", "", tmp_path / "out").summary["steps"] < 1_000_000


@pytest.mark.slow
def test_header_says_how_workers_and_batch_are_laid_out(tmp_path):
    ended = resumed_runs.run("--workers 7 --steps 2 --eval-every 2", tmp_path)
    for words in (
        "batch 63 (9 per worker), the multiple of 7 nearest to the task's 64",
        "7 workers on 1 cpu device × 7 lanes",
        "1 of 3 devices",
    ):
        assert words in ended.stderr


TINY = (
    "--task support.tiny_tasks:drawing --workers 2 --steps 8 --eval-every 8 --period 4"
)
FLAGS = ["", "--seed 1", "--momentum 0.9", "--lr 0.2", "--schedule cosine"]
FLAGS += ["--momentum 0.9 --opt-state-at-sync average", "--batch-size 4", "--workers 4"]
FLAGS += ["--momentum 0.9 --opt-state-at-sync reset", "--warmup-steps 4"]
FLAGS += ["--sync-until 4", "--weight-decay 0.1", "--clip-norm 0.01", "--period 8"]
FLAGS += ["--nesterov", "--block-momentum 0.2", "--block-lr 0.5", "--optimizer adam"]
FLAGS += ["--algo diloco --reduce int4"]


@pytest.mark.slow
def test_each_flag_changes_the_params():
    """Trains without evaluations and files, which take most of a short run."""
    flag_by_params = {}
    for flag in FLAGS:
        plan = prepare(parse([*TINY.split(), *flag.split()]))
        s = plan.config
        data = plan.data
        rows = sampling.rows(s.seed, 0, s.steps, s.batch_size, data.examples)
        state, _ = plan.trainer.run(plan.state, rows, plan.trainer.place(data.train))
        assert (
            flag_by_params.setdefault(params_sha256(plan.trainer.center(state)), flag)
            == flag
        )


@pytest.mark.long
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_learns_digits_bare(name, tmp_path):
    ended = execute(f"--algo {name}", tmp_path)
    assert ended.code == 0, ended.stderr
    assert ended.summary["test_accuracy"] >= 0.9


@pytest.mark.slow
def test_note_says_that_the_last_steps_are_not_in_the_global_model(run, tmp_path):
    runs = resumed_runs.run("--steps 20 --period 16", tmp_path), run(BASE), run(UNEVEN)
    assert [ended.stderr.count("last sync") for ended in runs] == [1, 0, 0]
    [note] = [line for line in runs[0].stderr.splitlines() if "last sync" in line]
    assert "last 4 local steps" in note


@pytest.mark.slow
def test_diverged_run_ends_after_its_dispatch_with_complete_files(tmp_path):
    command = "--lr 1e6 --steps 32 --eval-every 16 --dispatch-steps 4"
    ended = resumed_runs.run(command, tmp_path / "out")
    assert ended.code == 3
    summary = ended.summary
    diverged_step = ended.summary["diverged_at"]
    assert set(summary) >= SUMMARY
    assert summary["diverged"] is True
    assert (
        summary["steps"] == ended.lines[-1]["step"] == 4 * (diverged_step // 4 + 1) < 32
    )
    assert summary["train_loss"] is None
    assert re.search(rf"diverged.*\bstep {diverged_step}\b", ended.stderr)
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_run_whose_last_step_ruins_the_model_has_diverged(tmp_path):
    ended = resumed_runs.run("--algo sync_sgd --lr 1e38 --steps 1", tmp_path / "out")
    assert (ended.code, ended.summary["diverged"]) == (3, True)
    assert "diverged: the test loss is" in ended.stderr
