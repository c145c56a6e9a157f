"""The evaluations and the summary of a run as text, for a person."""

import math
from typing import Any

from experiments.command.terminal import (
    count,
    effective,
    figure,
    format_bytes,
    label_measures,
    rate,
    show,
)
from experiments.command.text_tables import definitions, terminal_width, wrap_text
from experiments.training.progress import Evaluation
from experiments.training.summary import Summary


def describe_evaluation(
    evaluation: Evaluation, steps: int, lr: float, validation: float | None
) -> str:
    """Formats one evaluation, with the learning rate if it differs from `lr`."""
    measures = {"train_loss": evaluation.train_loss, **evaluation.measures}
    figures = [
        f"{name} {figure(x)}"
        for name, x in label_measures(measures, validation).items()
    ]
    if evaluation.learning_rate != lr:
        figures.append(f"lr {evaluation.learning_rate:.3g}")
    step = f"{evaluation.step:>{len(str(steps))}}"
    return "  ".join([f"step {step}/{steps}", *figures])


def show_summary(summary: Summary, out: Any) -> None:
    """Prints summary.json for a person, on stdout."""
    s = summary
    layout = _describe_layout(s)
    if s.lanes > 1 and s.lane_form:  # known after a dispatch
        layout += f" {s.lane_form}"
    steps_per_second = s.steps_per_second
    memory = "not known"
    if s.temp_bytes is not None:
        memory = f"{format_bytes(s.temp_bytes)} of intermediate results on a device"
    learning_rates = f"{rate(s.lr)} nominal, {effective(s.effective_lr)}"
    if s.learning_rate != s.lr:
        learning_rates += f"; {s.learning_rate:.3g} nominal at the end"
    measures_by_name = {"train_loss": s.train_loss, **s.measures}
    figures = {
        label: figure(x)
        for label, x in label_measures(measures_by_name, s.validation).items()
    }
    text_by_label = {
        **figures,
        "learning rate": learning_rates,
        "most a worker sent": _describe_sent(s),
        "speed": (
            f"{count(steps_per_second)} steps/s, "
            f"{count(steps_per_second * s.workers)} worker-steps/s, "
            f"{count(steps_per_second * s.batch_size)} examples/s"
        ),
        "memory": memory,
    }
    if s.mesh:
        text_by_label["a device holds"] = _describe_state(s)
    text_by_label["layout"] = f"{layout}, backend {s.backend}"
    text_by_label["time"] = (
        f"{s.seconds:.1f} s training, {s.total_seconds or 0:.1f} s in all"
    )
    text_by_label["files"] = str(out)
    if s.export is not None:
        text_by_label["model"] = s.export
    terminal_columns = terminal_width()
    headline = (
        f"{s.algo} on {s.task}: {s.steps} steps of batch {s.batch_size}, seed {s.seed}"
    )
    show(
        "\n".join(
            [
                *wrap_text(headline, terminal_columns),
                *definitions(text_by_label, terminal_columns),
            ]
        )
    )


def _describe_layout(summary: Summary) -> str:
    """Says where the workers were, as "8 workers on 2 cpu devices × 4 lanes"."""
    workers = _count(summary.workers, "worker")
    mesh = summary.mesh
    if mesh:
        devices = _count(math.prod(mesh.values()), "device")
        axes = ", ".join(f"{name} {size}" for name, size in mesh.items())
        workers = f"{workers} of {devices} ({axes})"
    devices = _count(summary.devices, f"{summary.platform} device")
    return f"{workers} on {devices} × {_count(summary.lanes, 'lane')}"


def _count(number: int, noun: str) -> str:
    """Returns a number with its noun, such as "1 lane" or "2 lanes"."""
    if number == 1:
        return f"1 {noun}"
    return f"{number} {noun}s"


def _describe_sent(summary: Summary) -> str:
    """Formats the bytes that a worker sent, and that each of its devices sent."""
    if summary.bytes_per_worker is None:
        return "not counted"
    text = format_bytes(summary.bytes_per_worker)
    if summary.syncs is not None:
        text += f" in {summary.syncs} syncs"
    if summary.mesh and summary.bytes_per_device is not None:
        text += f", each of its devices {format_bytes(summary.bytes_per_device)}"
    if summary.decided is not None:
        text += f", {summary.decided} of them triggered by the data"
    return text


def _describe_state(summary: Summary) -> str:
    """Formats the bytes of the workers' state on a device, with and without a mesh."""
    nouns = {"params": "params", "opt_state": "optimizer", "sync": "strategy"}
    bytes_by_part = summary.device_bytes
    parts = ", ".join(
        f"{noun} {format_bytes(bytes_by_part[x])}" for x, noun in nouns.items()
    )
    total = format_bytes(sum(bytes_by_part.values()))
    without = format_bytes(sum(summary.device_bytes_without_mesh.values()))
    return f"{total} of state ({parts}), without the mesh {without}"
