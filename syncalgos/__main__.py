"""Prints the version and the algorithms: `python -m syncalgos`."""

import inspect

from syncalgos import ALGORITHMS, __version__

CHECKOUT = """\
The command line is not part of the library; it needs a checkout of the project:
  python -m experiments.run --algo bmuf     trains a task with one algorithm
  python -m experiments.compare             compares several on the same batches"""


def main() -> None:
    """Prints the version, one algorithm per line, and the commands to try them."""
    print(f"syncalgos {__version__}")
    width = max(map(len, ALGORITHMS))
    for name, factory in ALGORITHMS.items():
        summary = (inspect.getdoc(factory) or "").partition("\n")[0]
        print(f"  {name:<{width}}  {summary}")
    print(CHECKOUT)


if __name__ == "__main__":
    main()
