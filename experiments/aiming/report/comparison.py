"""Compares the ledger's bytes with those of the compiled program."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from experiments.aiming.traffic import ACROSS, DISPATCH, Row

ROUNDING = 1e-6  # relative error of sums of fractions
WIDENED = 16  # largest factor: sums double bytes, float32 takes 4 times, padding 2


class Beside(NamedTuple):
    """One kind of collective of a device, in a step and all of its branches.

    Attributes:
        kind: kind of collective.
        counted: bytes that the ledger counts.
        calls: number of arrays that the ledger counts.
        found: bytes in the compiled program.
        collectives: number of collectives in the program: XLA may join arrays in one.
    """

    kind: str
    counted: float
    calls: int
    found: float
    collectives: int


class Comparison(NamedTuple):
    """The ledger compared with the compiled program.

    Attributes:
        rows: a row for each kind of collective.
        is_equal: whether all kinds have the same bytes.
        why: the reasons for the difference; () if there is no difference or no known
            reason.
    """

    rows: tuple[Beside, ...]
    is_equal: bool
    why: tuple[str, ...]


def compared(answer: Mapping[str, Any]) -> Comparison | None:
    """Compares the ledger's counts with those found in the program.

    Args:
        answer: the result of `prepare.compiled`.

    Returns:
        The comparison; None without a program, or if the ledger cannot count it.
    """
    traffic, ledger = answer.get("traffic"), answer.get("ledger")
    if traffic is None or ledger is None:
        return None
    # Metrics are averaged once, after all steps, and are not counted.
    sent = [x for x in traffic if x["scope"] == ACROSS and x["when"] != DISPATCH]
    counts = [*ledger["always"].items(), *ledger["branched"].items()]
    kinds = sorted({k for k, _ in counts} | {x["kind"] for x in sent})
    rows = tuple(
        Beside(
            kind,
            math.fsum(size for k, (size, _) in counts if k == kind),
            sum(calls for k, (_, calls) in counts if k == kind),
            math.fsum(x["bytes"] for x in sent if x["kind"] == kind),
            sum(x["calls"] for x in sent if x["kind"] == kind),
        )
        for kind in kinds
    )
    is_equal = all(_same(x.counted, x.found) for x in rows)
    return Comparison(rows, is_equal, () if is_equal else _why(answer, rows, sent))


def _same(x: float, y: float) -> bool:
    return math.isclose(x, y, rel_tol=ROUNDING, abs_tol=0.5)


def _why(
    answer: Mapping[str, Any], rows: Sequence[Beside], sent: Sequence[Row]
) -> tuple[str, ...]:
    """Returns the reasons for the difference."""
    differing = [x for x in rows if not _same(x.counted, x.found)]
    is_less = all(x.kind == "all_reduce" and x.found < x.counted for x in differing)
    is_half = all(
        x.kind == "permute" and _same(x.counted, 2 * x.found) for x in differing
    )
    totals = (math.fsum(x.counted for x in rows), math.fsum(x.found for x in rows))
    promoted = sum(x.get("promoted", 0) for x in sent)
    less, more = _gathered_by_sums(differing) or (0, 0)
    networks = {x["network"] for x in sent}
    within = ", after reducing within each slice" if "inside" in networks else ""
    places = answer["workers"] // answer["lanes"]
    wide = sum(x["calls"] for x in sent if x["group"] > places)
    reasons = {
        f"in {promoted} of the collectives the compiler uses wider numbers than the "
        "algorithm does": promoted,
        "a chip has several workers, and the ledger counts one on each": (
            answer["lanes"] > 1
        ),
        "the compiler uses other collectives for the same bytes: "
        f"{' and '.join(x.kind for x in differing)}": _same(*totals),
        f"the compiler turns small all-gathers ({less:,.0f} B) into all-reduces "
        f"({more:,.0f} B)": less,
        f"between slices the compiler pads the parts that it sends{within}": (
            "between" in networks and answer["slices"] > 1
        ),
        "the compiler sends less: if each chip of a worker holds a whole array, each "
        "sends only a part, and the chips gather the parts": answer["mesh"] and is_less,
        f"the compiler reduces within and across workers at once, in {wide} of the "
        "collectives": wide,
        "each of two workers is both neighbours of the other, and gets one message": (
            places == 2 and is_half
        ),
    }
    return tuple(text for text, holds in reasons.items() if holds)


def _gathered_by_sums(differing: Iterable[Beside]) -> tuple[float, float] | None:
    """Returns the bytes of missing gathers, and those of the sums that replace them.

    Summing arrays that are zero except for a worker's own part gathers these parts. It
    takes twice the bytes, or more if the type becomes wider.
    """
    by_kind = {x.kind: x.found - x.counted for x in differing}
    if by_kind.keys() != {"all_gather", "all_reduce"}:
        return None
    less, more = -by_kind["all_gather"], by_kind["all_reduce"]
    return (less, more) if 0 < less <= more <= WIDENED * less else None
