"""The target: the figure to which times are given."""

import math
from collections.abc import Sequence

from experiments.study.analysis.headline import Contender, best, standing
from experiments.study.analysis.results import Curve, Measure
from experiments.study.statistics import ROUNDING, Spread

SHARE = 0.05  # of a loss; of an accuracy a point


def default_target(contenders: Sequence[Contender], by: Measure) -> float | None:
    """A target that every algorithm reaches that is not worse than the best.

    It lies a point, or 5 % of a loss, from the best mean, or as far as the mean of one
    that is not told from the best. Of too few seeds to tell, it is one whose deviations
    overlap. The target is rounded to the side where it is easier.

    Args:
        contenders: all algorithms, their differences to the best of them.
        by: what they are compared by.
    """
    index = best([c.measure for c in contenders], by.higher_is_better)
    if index is None or (top := contenders[index].measure) is None:
        return None
    side = 1 if by.higher_is_better else -1
    margin = 1 / by.scale if by.higher_is_better else SHARE * abs(top.mean)
    good = [c.measure.mean for c in contenders if c.measure and _as_good(c, top, by)]
    target = min([side * top.mean - margin, *(side * mean for mean in good)])
    if not margin:
        return side * target
    unit = 10.0 ** (math.floor(math.log10(margin)) - 1)
    return side * round(math.floor(target / unit + 1e-6) * unit, 12)


def _as_good(contender: Contender, top: Spread, by: Measure) -> bool:
    """Whether one is not told from the best."""
    kind, measure = standing(contender, by.higher_is_better), contender.measure
    if kind == "few" and measure is not None:
        deviations = (measure.deviation or 0.0) + (top.deviation or 0.0)
        return abs(measure.mean - top.mean) <= deviations
    return kind in ("better", "unseen")


def reached(curve: Curve, by: Measure, target: float | None) -> int | None:
    """The first evaluation at which the mean is as good as the target."""
    if target is None or by.key not in curve.bands:
        return None
    side = 1 if by.higher_is_better else -1
    least = side * target - ROUNDING * abs(target)
    means = enumerate(curve.bands[by.key].mean)
    return next((i for i, x in means if side * x >= least), None)
