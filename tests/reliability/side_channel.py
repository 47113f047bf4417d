"""The statistic of the side channels: how well two sets of times can be told apart."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def area_under_curve(shorter: Sequence[float], longer: Sequence[float]) -> float:
    """The probability that a random element of `shorter` is less than one of `longer`. A tie counts as one half.

    This is the area under the ROC curve of somebody who guesses from one time which set it is from, and the
    Mann-Whitney U statistic divided by the number of pairs. It is 0.5 if the times tell nothing. Raises ValueError if
    one of the sets is empty.
    """
    if not shorter or not longer:
        raise ValueError("both sets need a time")
    ordered = np.sort(np.asarray(shorter))
    below = np.searchsorted(ordered, longer, side="left")
    not_above = np.searchsorted(ordered, longer, side="right")
    return float((below + not_above).sum() / (2 * len(shorter) * len(longer)))
