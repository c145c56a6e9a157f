"""A process that compiles one program: python -m experiments.aiming.compiling.child.

Its argument is a request in JSON; it answers by a line of JSON on its stdout. So the
compiler's variables are set before jax starts, its messages stay with the process, and
its memory is given back.
"""

import json
import os
import sys
import threading

from experiments.aiming import targets
from experiments.cli.errors import BadRequest
from experiments.training import config


def main() -> None:
    """Answers the request."""
    # Compilers print on both streams: the answer has a descriptor of its own.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        request = json.loads(sys.argv[1])
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            target = targets.parse(request["target"], request["slices"])
            run = config.parse(request["argv"])
            from experiments.aiming.compiling import prepare  # imports jax

            content = prepare.compiled(run, target, request["form"])
        except BadRequest as error:
            content = {"error": " ".join(str(error).split())}
        json.dump(content, answer)


def _end_with_parent() -> None:
    """Ends the process when stdin closes: nobody waits for the answer any more."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
