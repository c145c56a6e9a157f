"""Studies of sync_sgd and bmuf with runs that are stored, and were never trained."""

from dataclasses import replace
from typing import Any

from experiments import files
from experiments.study import config as study_config
from experiments.study.config import StudyConfig
from experiments.study.runs import RunSet, make_trial
from experiments.study.variants import combinations
from experiments.training import run_folder
from syncalgos.network import parse

EVALUATION_STEPS = (10, 20, 30)  # steps of the evaluations
STEPS = EVALUATION_STEPS[-1]
WORKERS = 2
STEP_TIME = 0.5
SLOW = parse("8kbit/s, 10ms")  # 1000 bytes a second
FAST = parse("1MB/s")
SETTINGS = {
    **{"workers": WORKERS, "steps": STEPS, "batch_size": 16, "optimizer": "sgd"},
    **{"momentum": 0.9, "weight_decay": None, "clip_norm": None, "sync_until": 0},
    **{"schedule": "constant", "warmup_steps": 0, "partition": "iid"},
    "opt_state_at_sync": "keep",
}
CONFIG = {
    **{"settings": SETTINGS, "backend": "pmap", "devices": 2, "platform": "cpu"},
    **{"task_arguments": {"model": "mlp"}, "versions": {"syncalgos": "1.2.3"}},
}
# What is sent: 100 bytes in one all-reduce at every step, or at every tenth.
ALWAYS = {"kinds": [{}, {"all_reduce": [100.0, 1]}], "steps": f"1*{STEPS}", "delay": 0}
TENTH = ALWAYS | {"steps": " ".join(["0*9 1*1"] * 3)}
BYTES = {"sync_sgd": 100, "sign_sgd": 100, "bmuf": 10}  # a step
SENDS = {"sync_sgd": ALWAYS, "sign_sgd": ALWAYS, "bmuf": TENTH}


def read_study(out, *argv, seeds=5) -> StudyConfig:
    """A study of sync_sgd and bmuf, with the flags given."""
    networks = ["--network", SLOW.name, "--network", FAST.name]
    study_flags = [
        "--algos=sync_sgd,bmuf",
        f"--step-time={STEP_TIME}",
        f"--seeds={seeds}",
    ]
    return study_config.read_command_line(
        [*study_flags, *networks, f"--out={out}", *argv]
    )


def list_run_sets(study):
    """Every algorithm at every value of the sweep, with its trials."""
    run_sets = []
    for number, variant in enumerate(study.variants, 1):
        for point, common in study.points[variant.label].items():
            runs = RunSet(variant, number, point, common, study.out, range(study.seeds))
            trials = [
                make_trial(study, runs, values)
                for values in combinations(variant.tuned)
            ]
            run_sets.append(runs._replace(trials=trials))
    return run_sets


def make_line(step, accuracy, algo="bmuf", **fields):
    """A line of metrics.jsonl."""
    loss = 1 - accuracy if accuracy is not None else None
    return {
        **{"step": step, "train_loss": loss, "test_loss": loss},
        **{"test_accuracy": accuracy, "bytes_per_worker": BYTES[algo] * step},
        **{"divergence": 0.0, "pseudo_gradient": None, "displacement_cosine": None},
        **{"seconds": 0.1 * step, **fields},
    }


def write_run(run, algo, accuracies, config=None, lines=None, **fields):
    """The files of one run."""
    run.mkdir(parents=True)
    pairs = zip(EVALUATION_STEPS, accuracies, strict=True)
    lines = lines or [make_line(step, accuracy, algo) for step, accuracy in pairs]
    summary = {
        **{k: x for k, x in lines[-1].items() if k != "step"},
        **{"steps": lines[-1]["step"], "workers": WORKERS, "devices": 2},
        **{"lr": 0.05, "effective_lr": 0.4, "platform": "cpu", "seconds": 6.0},
        **{"syncs": BYTES[algo] * lines[-1]["step"] // 100, "sends": SENDS[algo]},
        **{"center_step": STEPS, "not_counted": None, "diverged": False, **fields},
    }
    config = CONFIG | {"settings": SETTINGS | (config or {})}
    files.write_json(run / "config.json", config)
    run_folder.finish(run, summary, lines)


def make_runs(study, finals, values: Any = None, run_changes=None, **fields):
    """Runs whose accuracies end as `finals` says: seeds of (label, point).

    Args:
        study: the study.
        finals: the ends.
        values: those that were chosen, point by point; None: nothing was tuned.
        run_changes: what is written of single runs, by their algorithm and seed.
        fields: what is written of all.
    """
    run_sets = []
    all_points = list_run_sets(study)
    values = values or [{}] * len(all_points)
    for point, best in zip(all_points, values, strict=True):
        algo = point.variant.algo
        runs = point._replace(values=best)
        ends = finals[point.variant.label, point.point]
        for seed, end in zip(point.seeds, ends, strict=True):
            changes = fields | (run_changes or {}).get((algo, seed), {})
            write_run(
                runs.seed_folder(seed), algo, (end - 0.4, end - 0.1, end), **changes
            )
        run_sets.append(runs.read())
    return run_sets


def change_summary(run_set, seed, **values):
    """Changes what a run set has read of the run of a seed."""
    run_set.summaries[seed] = replace(run_set.summaries[seed], **values)
