"""Remarks after a run: a reader learns that an earlier model was better."""

import pytest

from experiments.training.progress import Evaluation
from experiments.training.remarks import compare_with_best


def make_evaluation(step: int, loss: float, accuracy: float | None) -> Evaluation:
    return Evaluation.from_json(
        {"step": step, "test_loss": loss, "test_accuracy": accuracy}
    )


def test_a_run_that_ends_with_a_lower_accuracy_names_its_best_step():
    evaluations = [
        make_evaluation(step, loss=1.0, accuracy=accuracy)
        for step, accuracy in ((24, 0.5), (48, 0.62), (72, 0.41))
    ]
    assert compare_with_best(evaluations, validation=None) == (
        "test accuracy: best 0.6200 at step 48, 0.4100 at the end"
    )
    remark = compare_with_best(evaluations, validation=0.2) or ""
    assert remark.startswith("validation accuracy: ")


def test_a_run_without_an_accuracy_is_judged_by_its_loss():
    evaluations = [make_evaluation(8, 0.5, None), make_evaluation(16, 0.75, None)]
    assert compare_with_best(evaluations, validation=None) == (
        "test loss: best 0.5000 at step 8, 0.7500 at the end"
    )


@pytest.mark.parametrize(
    ("losses", "accuracies"),
    [
        ((1.0, 0.5), (0.5, 0.6)),
        ((0.5, 0.9), (0.6, 0.59)),
        ((0.5, 0.52), (None, None)),
        ((-2.0, -1.9), (None, None)),
    ],
)
def test_a_run_that_ends_at_its_best_up_to_noise_needs_no_remark(losses, accuracies):
    evaluations = [
        make_evaluation(step, loss, accuracy)
        for step, loss, accuracy in zip((8, 16), losses, accuracies, strict=True)
    ]
    assert compare_with_best(evaluations, validation=None) is None
