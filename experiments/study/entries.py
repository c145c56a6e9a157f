"""The algorithms of a study as `--algos` has them, and flags cut apart."""

import re
import shlex
from collections.abc import Sequence
from typing import NamedTuple

from experiments.cli.errors import BadRequest
from experiments.cli.words import with_dashes
from experiments.study.search_space import Words


class Entry(NamedTuple):
    """An algorithm with flags of its own.

    Attributes:
        label: as it is shown.
        algo: its name.
        words: its own flags, as on the command line of experiments.run.
    """

    label: str
    algo: str
    words: Words


def entries(text: str) -> list[Entry]:
    """Reads `--algos`: "sync_sgd, bmuf --nesterov, Slow=diloco --outer-lr 0.4".

    Args:
        text: algorithms with commas between them; each may have flags of its own, and a
            label before =.

    Raises:
        BadRequest: none, or two of one label.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise BadRequest(
            f"--algos {text!r}: a quotation mark is not closed, or a backslash is last"
        ) from None
    groups: list[list[str]] = [[]]
    for token in tokens:
        if set(token) == {","}:
            groups += [[] for _ in token]
        else:
            groups[-1].append(token)
    found = [_entry(text, words) for words in groups]
    labels = [entry.label for entry in found]
    if twice := next((x for x in labels if labels.count(x) > 1), None):
        raise BadRequest(
            f"--algos has {twice!r} twice: give one another label, as in other="
            f"{found[labels.index(twice)].algo}"
        )
    return found


def _entry(text: str, words: Sequence[str]) -> Entry:
    if not words or words[0].startswith("-"):
        raise BadRequest(
            f"--algos {text!r}: every algorithm needs a name, as in "
            "sync_sgd,bmuf --nesterov"
        )
    if "-h" in words:
        raise BadRequest(
            f"--algos {text!r}: see python -m experiments.run --algo NAME --help"
        )
    label, equals, name = words[0].rpartition("=")
    own = tuple(with_dashes(word) for word in words[1:])
    if not name or (equals and not label):
        raise BadRequest(
            f"--algos {text!r}: {words[0]!r} must be a label, = and a name, without "
            "spaces around ="
        )
    return Entry(label or " ".join([name, *own]), name, own)


def groups_of_flags(words: Sequence[str]) -> list[Words]:
    """A command line cut before each flag: [("--lr", "0.1"), ("--nesterov",)]."""
    groups: list[list[str]] = []
    for word in words:
        if word.startswith("--"):
            groups.append([with_dashes(word)])
        elif groups:
            groups[-1].append(word)
        else:
            raise BadRequest(f"unexpected argument {word!r}")
    return [tuple(group) for group in groups]


def parameter(flag: str) -> str:
    """The name of the parameter that a flag sets: "--no-nesterov" -> "nesterov"."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return re.sub("^no_", "", name)
