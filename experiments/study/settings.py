"""What was run: the settings of a report's runs, their versions and machines."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.command import terminal
from experiments.study.config import StudyConfig
from experiments.study.formats import MAX_LABELS, join_words
from experiments.study.runs import RunSet
from experiments.study.sentences import PHRASES, say
from experiments.training.summary import Summary
from syncalgos.network import all_reduce_algorithms


def list_settings(config: StudyConfig, run_sets: Sequence[RunSet]) -> dict[str, str]:
    """Returns the settings of the runs; where they differ, those of each run set."""
    settings = {"task": _task_name(config, run_sets)}
    settings["seeds"] = f"0 to {config.seeds - 1}"
    if config.tuned:
        settings["seeds of a trial"] = _describe_tune_seeds(config)
    arguments = _describe_arguments(run_sets)
    if arguments:
        settings["arguments"] = arguments
    all_reduces = _describe_all_reduces(config, run_sets)
    if all_reduces:
        settings["modelled all-reduces"] = all_reduces
    if config.swept:
        values = ", ".join(config.swept.values)
        settings["swept"] = f"{config.swept.flag} over {values}"
    settings_of_sets = []
    for run_set in run_sets:
        sizes = {"examples": _describe_examples(run_set)}
        settings_of_sets.append(sizes | _run_settings(run_set.config))
    names: dict[str, None] = {}
    for run_settings in settings_of_sets:
        names |= dict.fromkeys(run_settings)
    for name in names:
        values = [run_settings.get(name) for run_settings in settings_of_sets]
        # No run set sets it, such as --clip-norm.
        if any(value is not None for value in values):
            settings[name] = _join_values(run_sets, [str(value) for value in values])
    return settings


def _describe_tune_seeds(config: StudyConfig) -> str:
    """Returns the seeds of a trial, and those of a trial near the best."""
    text = str(config.tune_seeds)
    for axis in config.tuned:
        if axis.near_seeds:
            text += f"; {axis.near_seeds} near the best {axis.flag.replace('_', '-')}"
    return text


def _describe_all_reduces(config: StudyConfig, run_sets: Sequence[RunSet]) -> str:
    """Returns the algorithms of modelled all-reduces, and on which networks."""
    networks_by_algorithms: dict[str, list[str]] = {}
    for network in config.networks:
        algorithms: set[str] = set()
        for run_set in run_sets:
            workers = run_set.first_summary.workers
            for sends in run_set.sends or ():
                algorithms.update(
                    all_reduce_algorithms(sends.kinds, network, workers, config.fused)
                )
        if algorithms:
            joined = " or ".join(sorted(algorithms))
            networks_by_algorithms.setdefault(joined, []).append(network.name)
    return "; ".join(
        f"{algorithms} on {join_words(networks)}"
        for algorithms, networks in networks_by_algorithms.items()
    )


def _task_name(config: StudyConfig, run_sets: Sequence[RunSet]) -> str:
    """Returns the name of the file that all runs read, or else of their task."""
    paths = {run_set.config["task_arguments"].get("file") for run_set in run_sets}
    if len(paths) == 1:
        [path] = paths
        if path:
            return Path(path).name
    return config.task


def _describe_arguments(run_sets: Sequence[RunSet]) -> str:
    """Returns the arguments that all points of a variant share, by variant."""
    arguments_by_label: dict[str, dict[str, Any]] = {}
    for run_set in run_sets:
        label = run_set.variant.label
        arguments = run_set.config.get("arguments") or {}
        # What differs between the points is swept or tuned.
        shared = arguments_by_label.get(label, arguments)
        arguments_by_label[label] = {
            name: value
            for name, value in shared.items()
            if arguments.get(name) == value
        }
    if len(arguments_by_label) > MAX_LABELS:
        return ""
    texts = []
    for label, arguments in arguments_by_label.items():
        if arguments:
            pairs = [f"{name} {value}" for name, value in arguments.items()]
            texts.append(f"{label}: {', '.join(pairs)}")
    return "; ".join(texts)


def _describe_examples(run_set: RunSet) -> str | None:
    """Returns the sizes of the data sets; None for runs of earlier versions."""
    sizes = run_set.first_summary.examples
    if not sizes:
        return None
    for trial in run_set.trials:
        if trial.summaries:
            return say(
                "examples.with_validation",
                train=sizes["train"],
                test=sizes["test"],
                validation=trial.first_summary.examples["test"],
            )
    return say("examples.sizes", train=sizes["train"], test=sizes["test"])


def _run_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings to show of a config.json; None for those without one."""
    values = config["settings"]
    settings = {}
    for key, name in PHRASES["settings"].items():
        # Runs of earlier versions lack some.
        settings[name] = values.get(key)
    sync_until = PHRASES["settings"]["sync_until"]
    settings[sync_until] = settings[sync_until] or None
    settings["backend"] = config["backend"]
    settings["devices"] = f"{config['devices']} × {config['platform']}"
    mesh = config.get("mesh") or {}
    settings["devices of a worker"] = terminal.mesh_text(mesh) or None
    for name, value in config["task_arguments"].items():
        if value != "":
            settings[f"task: {name}"] = value
    return settings


def _join_values(run_sets: Sequence[RunSet], values: Sequence[str]) -> str:
    """Returns the value that all run sets have, or that of each."""
    if len(set(values)) == 1:
        return values[0]
    pairs = zip(run_sets, values, strict=True)
    return "; ".join(f"{run_set.name}: {value}" for run_set, value in pairs)


def list_environment(run_sets: Sequence[RunSet]) -> dict[str, str]:
    """Returns the versions and machines of all runs, those that tune among them."""
    values_by_name: dict[str, dict[str, None]] = {}
    for run_set in run_sets:
        for part in (run_set, *run_set.trials):
            for summary in part.summaries.values():
                versions = summary.versions or part.config["versions"]
                machine = {"machine": _describe_machine(summary)}
                for name, value in {**versions, **machine}.items():
                    values_by_name.setdefault(name, {})[value] = None
    return {name: join_words([*values]) for name, values in values_by_name.items()}


def _describe_machine(summary: Summary) -> str:
    devices = f"{summary.devices} × {summary.platform}"
    # Runs of earlier versions do not say their processor.
    if summary.processor is not None:
        return f"{devices} ({summary.processor})"
    return devices
