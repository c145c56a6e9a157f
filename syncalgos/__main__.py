"""Prints the version and the algorithms: `python -m syncalgos`."""

import inspect

from syncalgos import ALGORITHMS, __version__

CHECKOUT = """\
The command line lies beside the library, in a checkout of the project:
  python -m experiments.run --algo bmuf     trains a task by one of them
  python -m experiments.compare             compares several on the same batches"""


def main() -> None:
    """Prints them, an algorithm a line, and where they can be tried."""
    print(f"syncalgos {__version__}")
    width = max(map(len, ALGORITHMS))
    for name, factory in ALGORITHMS.items():
        summary = (inspect.getdoc(factory) or "").partition("\n")[0]
        print(f"  {name:<{width}}  {summary}")
    print(CHECKOUT)


if __name__ == "__main__":
    main()
