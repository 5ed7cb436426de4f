"""Means and their intervals."""

from collections.abc import Sequence

import numpy as np
from scipy import stats


def interval(
    values: Sequence[float] | np.ndarray, level: float = 0.95
) -> tuple[float, float]:
  """Returns the mean of independent values, and half of its interval's width.

  The interval is Student's: mean +- t(level, n - 1) sd / sqrt(n), with the
  standard deviation of n - 1. NaN for the width of fewer than two values.

  Args:
    values: `[n]`, n at least 1.
    level: probability that the interval covers the mean.

  Raises:
    ValueError: no values.
  """
  values = np.asarray(values, np.float64)
  if not values.size:
    raise ValueError('No values, no mean.')
  if values.size < 2:
    return float(values.mean()), float('nan')
  quantile = stats.t.ppf((1 + level) / 2, values.size - 1)
  width = quantile * values.std(ddof=1) / np.sqrt(values.size)
  return float(values.mean()), float(width)
