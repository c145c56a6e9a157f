"""Train a custom strategy on a task of the harness, by a call.

    python examples/harness.py

It shows `experiments.train`: a strategy as an object, evaluations as they are made, and
the same hash as that of the registered algorithm with the same steps.
"""

import optax

import syncalgos
from experiments import RunConfig, train

config = RunConfig(task="digits", workers=4, steps=192, eval_every=96)


def show(line):
    print(f"step {line['step']}: test accuracy {line['test_accuracy']:.3f}")


outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
own_algorithm = syncalgos.every(syncalgos.outer_step(outer), 16)
run = train(config, strategy=own_algorithm, on_evaluation=show)
named_run = train(RunConfig(**{**vars(config), "algo": "diloco"}))

sent_bytes = run.summary["bytes_per_worker"]
print(f"each worker sent {sent_bytes:,} bytes in {run.summary['syncs']} syncs")
hashes = {run.summary["params_sha256"], named_run.summary["params_sha256"]}
print("the same bits as diloco" if len(hashes) == 1 else "other bits than diloco")
