"""Each worker's own loss in metrics.jsonl, against a quadratic by hand."""

import json

import numpy as np
import pytest
from support.resumed_runs import run

from experiments.checkpoint.resume import Record, read_record
from experiments.checkpoint.shards import Shard
from experiments.training.progress import Evaluation, Progress

# Workers see only 0 or only 1, go half of the way there in each step, and average
# after two: from 0 and 0 to 0 and 3/4, and on from 3/8.
COMMAND = (
    "--task support.tiny_tasks:levels --workers 2 --partition label "
    "--algo model_averaging "
    "--period 2 --lr 0.25 --steps 4 --eval-every 2"
)
LOSSES = [[0, (1 + 1 / 4) / 2], [(9 / 64 + 9 / 256) / 2, (25 / 64 + 25 / 256) / 2]]


def test_a_line_has_the_mean_loss_of_each_worker(tmp_path):
    ended = run(COMMAND, tmp_path / "out").with_code(0)
    worker_losses = [line["worker_losses"] for line in ended.lines]
    assert worker_losses == pytest.approx(np.array(LOSSES), rel=1e-5)
    assert [line["train_loss"] for line in ended.lines] == pytest.approx(
        np.mean(LOSSES, axis=1)
    )
    assert ended.summary["worker_losses"] == worker_losses[-1]


def test_losses_are_summed_across_a_checkpoint_within_a_stretch():
    progress = Progress()
    progress.add_dispatch([2.0, 3.0], np.array([[1.0, 3.0], [2.0, 4.0]]), 0.1)
    text = json.dumps(Record(progress, {}, {}, None).to_json())
    shard = Shard(progress.step, 2, 0, {}, {}, json.loads(text))
    progress = read_record(shard).progress
    progress.add_dispatch([1.0], np.array([[0.0, 2.0]]), 0.1)
    assert progress.mean_worker_losses() == [1.0, 3.0]


def test_an_evaluation_is_written_as_it_was_read():
    line = {
        "step": 8,
        "train_loss": 0.5,
        "worker_losses": [0.25, 0.75],
        "test_loss": 0.6,
        "test_accuracy": None,
        "test_perplexity": 1.8,
        "bytes_per_worker": 4096,
        "divergence": 0.0,
        "learning_rate": 0.1,
        "pseudo_gradient": 0.01,
        "displacement_cosine": 0.9,
        "drift": 0.2,
        "seconds": 1.25,
    }
    written = Evaluation.from_json(line).to_json()
    assert json.dumps(written) == json.dumps(line)
    progress = Progress(step=8, evaluations=[Evaluation.from_json(line)])
    content = progress.to_json()
    assert content["lines"] == [line]
    assert Progress.from_json(content) == progress


@pytest.mark.parametrize(
    "stored_losses", [[], [1.0, 2.0, 3.0]], ids=["0.2", "three-workers"]
)
def test_losses_that_a_checkpoint_lacks_are_not_known_until_the_next_line(
    stored_losses,
):
    content = Progress(step=1, losses=[2.0], first_loss=2.0).to_json()
    del content["worker_losses"]
    progress = Progress.from_json(content)
    progress.worker_losses = stored_losses
    for _ in range(2):
        progress.add_dispatch([2.0], np.array([[1.0, 3.0]]), 0.1)
        assert progress.mean_worker_losses() is None
    progress.add_evaluation(Evaluation.from_json({"step": 3}))
    progress.add_dispatch([2.0], np.array([[1.0, 3.0]]), 0.1)
    assert progress.mean_worker_losses() == [1.0, 3.0]
