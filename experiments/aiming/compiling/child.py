"""A process that compiles one program: python -m experiments.aiming.compiling.child.

Its argument is a request in JSON; it answers with a line of JSON on stdout. A separate
process allows the compiler's variables to be set before jax starts, catches its
messages, and frees its memory.
"""

import json
import os
import sys
import threading

from experiments.aiming import targets
from experiments.cli.errors import BadRequest, in_one_line
from experiments.training import config


def main() -> None:
    """Answers the request."""
    # Compilers print on both streams: the answer gets a separate descriptor.
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answer:
        os.dup2(2, 1)
        request = json.loads(sys.argv[1])
        threading.Thread(target=_end_with_parent, daemon=True).start()
        try:
            target = targets.parse(request["target"], request["slices"])
            run = config.parse(request["argv"])
            from experiments.aiming.compiling import prepare  # imports jax

            content = prepare.compiled(run, target)
        except BadRequest as error:
            content = {"error": in_one_line(error)}
        json.dump(content, answer)


def _end_with_parent() -> None:
    """Ends the process when stdin closes, because nobody waits for the answer then."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
