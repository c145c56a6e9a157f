"""The variants of a study, as --algos spells them, and the flags that each has."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

from experiments.cli import factories, flags
from experiments.cli.errors import BadRequest
from experiments.cli.factories import ALGORITHM, TASK
from experiments.cli.library import checks
from experiments.cli.words import with_dashes
from experiments.study.search_space import Words
from experiments.training.config import SETTINGS

# Flags of single runs that a study sets itself, and the flag that takes their place.
TAKEN = {name: each.study for name, each in SETTINGS.items() if each.study}
TAKEN |= {"help": "experiments.run --algo NAME --help"}


class Variant(NamedTuple):
    """An algorithm with flags of its own.

    Attributes:
        label: name in the report.
        algo: name of the algorithm.
        words: its own flags, as on the command line of experiments.run.
    """

    label: str
    algo: str
    words: Words = ()

    @property
    def parameters(self) -> list[str]:
        """The parameters that its own flags set."""
        return [parameter(group[0]) for group in flag_groups(self.words)]


def variants(text: str) -> tuple[Variant, ...]:
    """Reads `--algos`: "sync_sgd, bmuf --nesterov, Slow=diloco --outer-lr 0.4".

    Args:
        text: algorithms, separated by commas; each may have flags of its own, and a
            label before =.

    Raises:
        BadRequest: no algorithm, or two with one label.
    """
    lexer = shlex.shlex(text, posix=True, punctuation_chars=",")
    # A label may have a #.
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        tokens = list(lexer)
    except ValueError:
        raise BadRequest(
            f"--algos {text!r}: a quotation mark is not closed, or a backslash is last"
        ) from None
    groups: list[list[str]] = [[]]
    for token in tokens:
        # Adjacent commas are one token: between them a name is missing.
        if set(token) == {","}:
            groups += [[] for _ in token]
        else:
            groups[-1].append(token)
    found = tuple(_variant(text, words) for words in groups)
    labels = [variant.label for variant in found]
    if twice := next((x for x in labels if labels.count(x) > 1), None):
        raise BadRequest(
            f"--algos has {twice!r} twice: give one another label, as in other="
            f"{found[labels.index(twice)].algo}"
        )
    return found


def _variant(text: str, words: Sequence[str]) -> Variant:
    """Reads one algorithm of --algos, whose whole text an error shows."""
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
    return Variant(label or " ".join([name, *own]), name, own)


def flag_groups(words: Sequence[str]) -> list[Words]:
    """Splits a command line before each flag: [("--lr", "0.1"), ("--nesterov",)]."""
    groups: list[Words] = []
    for word in words:
        if word.startswith("--"):
            groups.append((with_dashes(word),))
        elif groups:
            groups[-1] += (word,)
        else:
            raise BadRequest(f"unexpected argument {word!r}")
    return groups


def parameter(flag: str) -> str:
    """Returns the parameter that a flag sets: "--no-nesterov" -> "nesterov"."""
    name = flag.partition("=")[0].removeprefix("--").replace("-", "_")
    return re.sub("^no_", "", name)


def flag_of(name: str) -> str:
    """Returns the flag of a parameter: "block_lr" -> "--block-lr"."""
    return f"--{name.replace('_', '-')}"


def known_flags(task: str, algo: str) -> set[str]:
    """Returns the parameters of an algorithm's runs that a study may set."""
    return {
        *(SETTINGS.keys() - TAKEN.keys()),
        *factories.flag_names(TASK, task),
        *factories.flag_names(ALGORITHM, algo),
    }


def refuse_taken(names: Iterable[str]) -> None:
    """Raises a BadRequest for a flag of single runs that a study sets itself."""
    for name in names:
        if name in TAKEN:
            raise BadRequest(f"{flag_of(name)} is for single runs: say {TAKEN[name]}")


def refuse_unknown(
    names: Iterable[str], known: Mapping[Variant, set[str]], others: Iterable[str]
) -> None:
    """Raises a BadRequest for a flag of no variant.

    Args:
        names: the parameters that were given, swept or tuned.
        known: the parameters of each variant.
        others: the study's own, one of which may have been meant.
    """
    every = set().union(*known.values())
    for name in names:
        if name in every:
            continue
        flags_of_all = [flag_of(x) for x in (*every, *others)]
        owners = ", ".join(flags.owners_of(ALGORITHM, name))
        nearest = checks.nearest(flag_of(name), flags_of_all)
        hint = f": it belongs to {owners}" if owners else nearest
        algos = ", ".join(dict.fromkeys(variant.algo for variant in known))
        raise BadRequest(f"'{flag_of(name)}' is a flag of none of {algos}{hint}")


def run_words(variant: Variant, task: str, shared: Sequence[Words]) -> list[str]:
    """Returns the flags of a variant's runs, without the swept and the tuned ones."""
    known = known_flags(task, variant.algo)
    # A shared flag goes to the variants that have it. One that none has is refused.
    own = chain.from_iterable(g for g in shared if parameter(g[0]) in known)
    # The variant's own flags come last: of two equal flags the last one holds.
    return [
        *("--algo", variant.algo, "--task", task, "--displacements"),
        *own,
        *variant.words,
    ]
