"""Compares algorithms: `python -m experiments.compare --algos sync_sgd,bmuf`.

In Python, `experiments.compare` is the function of `experiments.api`: import the
command from `experiments.study.main`.
"""

# PYTHON_ARGCOMPLETE_OK

import sys

from experiments.command import flags
from experiments.study import config
from experiments.study.main import main

if __name__ == "__main__":
    flags.complete(lambda words: config.parser())
    sys.exit(main())
