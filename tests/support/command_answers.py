"""Commands that a process answers one after the other, and modules of a user's own."""

import json

from support.commands import ROOT, run_python

ANSWER = """
import contextlib, importlib, io, json, shlex, sys
answers, slow = [], {"jax", "optax", "sklearn", "grain", "safetensors"}
for asked in json.load(sys.stdin):
    name, _, command = asked.partition(" ")
    module = {"aim": "aim.__main__"}.get(name, name)
    main = importlib.import_module(f"experiments.{module}").main
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(shlex.split(command))
        except SystemExit as exit:
            code = exit.code
    imported = sorted(slow & {*sys.modules})
    answers.append([code, out.getvalue(), err.getvalue(), imported])
print(json.dumps(answers))
"""

MODULES = {
    "broken": "raise OSError('out of\\nluck')",
    "mine": '''
import jax
import syncalgos
from syncalgos import Strategy, collectives


def pull(period: int = 4, strength: float = 0.5) -> Strategy:
    """Pulls replicas to their mean.

    Args:
        period: steps between pulls.
        strength: how far replicas go,
            where 1 is 100% of the way.
    """

    def nearer(x, mean):
        return x + strength * (mean - x)

    def sync(replica, state, step):
        means = collectives.mean(replica.params)
        params = jax.tree.map(nearer, replica.params, means)
        return replica._replace(params=params), state

    return syncalgos.every(Strategy(sync=sync), period)


def number():
    return 3


def failing():
    raise RuntimeError("out of ideas")


def refusing(hidden: int = 3):
    raise ValueError(f"hidden must be even, got {hidden}")


def taken(workers=3):
    return Strategy()


def aimed(target=3):
    return Strategy()


def denied(fast=False, no_fast=3):
    return Strategy()


def labelled(label=3, step=4, drift=5):
    return pull(label)


def reshaping():
    def sync(replica, state, step):
        wider = jax.tree.map(lambda x: x[None], replica.params)
        return replica._replace(params=wider), state

    return Strategy(sync=sync)


def branching():
    def sync(replica, state, step):
        return (replica, state) if step % 2 else (replica, ())

    return Strategy(sync=sync)


def narrowing():
    def sync(replica, state, step):
        half = jax.tree.map(lambda x: x.astype("bfloat16"), replica.params)
        return replica._replace(params=half), state

    return Strategy(sync=sync)
''',
}


def write_modules(folder):
    for name, source in MODULES.items():
        (folder / f"{name}.py").write_text(source)
    return folder


def answered(commands, cwd=ROOT, **environ):
    """Answers commands such as "run --algo bmuf" in a fresh process.

    Returns:
        The exit code, stdout and stderr of each, and the slow modules, jax among them,
        that were imported by then.
    """
    commands_json = json.dumps([*commands])
    return json.loads(
        run_python(["-c", ANSWER], cwd, stdin_text=commands_json, **environ)[0]
    )


def assert_told(answer, expected_words, is_tried=False):
    """Asserts that a request was refused in a line, which names this.

    Args:
        answer: of `answered`.
        expected_words: what the line must hold.
        is_tried: whether a model was drawn before it, of which jax writes lines too.
    """
    code, out, err, _ = answer
    assert (code, out) == (2, "")
    # An optimizer is tried out on shapes alone.
    lines = [x for x in err.splitlines() if not x.startswith("Finished tracing")]
    [line] = lines[-1:] if is_tried else lines
    assert line.startswith("error: ")
    assert [text for text in expected_words if text not in line] == []
