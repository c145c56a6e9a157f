"""--keep best: the model, and the checkpoint, of the best evaluation."""

import pytest
from support.resumed_runs import run, signal_before

from experiments.checkpoint.shards import find_steps
from experiments.training import export
from experiments.training.progress import Evaluation, find_best

WORDS = "--task digits --algo sync_sgd --workers 2 --lr 2.5 --eval-every 2"
WORDS += " --dispatch-steps 2 --checkpoint-every 2"


@pytest.mark.slow
def test_the_best_evaluation_is_exported_and_its_checkpoint_kept(tmp_path):
    path = tmp_path / "best.safetensors"
    alone = tmp_path / "alone.safetensors"
    words = f"{WORDS} --steps 16 --keep best --export {path}"
    run(words, tmp_path / "out", signal_before(6)).with_code(75)
    ended = run(f"{words} --resume", tmp_path / "out")
    accuracies = {line["step"]: line["test_accuracy"] for line in ended.lines}
    step = max(accuracies, key=accuracies.get)
    assert step < 16 and ended.summary["export"] == str(path)
    assert step not in (12, 14, 16)
    assert [*find_steps(tmp_path / "out" / "checkpoints")] == [16, 14, 12, step]
    # A run that ends there has that model.
    run(f"{WORDS} --steps {step} --export {alone}", tmp_path / "shorter")
    exported = export.load(path).params
    expected = export.load(alone).params
    for layer, expected_layer in zip(exported, expected, strict=True):
        assert (layer["w"] == expected_layer["w"]).all() and (
            layer["b"] == expected_layer["b"]
        ).all()


@pytest.mark.slow
def test_no_model_is_written_of_an_evaluation_that_a_stop_makes(tmp_path):
    path = tmp_path / "best.safetensors"
    words = f"{WORDS} --steps 16 --keep best --export {path}"
    words = words.replace("--eval-every 2", "--eval-every 8")
    stopped_run = run(words, tmp_path / "out", signal_before(2))
    assert stopped_run.code == 75 and not path.exists()
    assert stopped_run.summary["export"] is None
    assert f"no model was written to {path}" in stopped_run.stderr


@pytest.mark.slow
def test_a_resumed_run_remembers_evaluations_that_it_did_not_plan(tmp_path):
    path = tmp_path / "best.safetensors"
    words = f"{WORDS} --lr 0.5 --eval-every 3 --keep best --export {path}"
    run(f"{words} --steps 4", tmp_path / "out")
    ended = run(f"{words} --steps 8 --resume", tmp_path / "out")
    accuracies = {line["step"]: line["test_accuracy"] for line in ended.lines}
    assert max(accuracies, key=accuracies.get) == 4 and 8 in accuracies
    assert export.facts(path)["steps"] == "4"


@pytest.mark.long
def test_another_runs_model_is_not_taken_for_the_best(tmp_path, monkeypatch):
    path = tmp_path / "best.safetensors"
    words = f"{WORDS} --steps 4 --keep best --overwrite --export {path}"
    assert run(f"{words} --seed 1", tmp_path / "first").summary["export"] == str(path)

    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr(export, "save", full)
    ended = run(words, tmp_path / "second")
    assert ended.code == 1 and ended.summary["export"] is None
    assert f"{path} does not hold the best model, that of step" in ended.stderr


@pytest.mark.parametrize(
    ("figures", "best_index"),
    [
        ([(0.5, 1.0), (0.7, 2.0), (0.7, 0.5)], 1),
        ([(None, 1.0), (None, 0.5), (None, float("nan"))], 1),
        ([(None, None), (0.9, float("nan")), (0.9, None)], None),
    ],
)
def test_accuracy_decides_or_else_loss(figures, best_index):
    evaluations = [
        Evaluation.from_json({"test_accuracy": accuracy, "test_loss": loss})
        for accuracy, loss in figures
    ]
    best = find_best(evaluations)
    assert best is (None if best_index is None else evaluations[best_index])
