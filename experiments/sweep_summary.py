"""From the curves of runs to tables over warm starts.

The warm start is the unit of replication: runs from one start are averaged
first, intervals are over starts, and recipes are compared by the difference to
the baseline from the same start.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from experiments import statistics

WINDOW = 20  # steps of a moving mean, and of what is said of the end
BASELINE = 'bf16'

_FLOOR = 0.1  # a reward that must have been passed before it can collapse
_LOCAL = 15  # steps on either side, for the local median of a gradient norm

type Row = dict[str, Any]


def summarize(
    curves: Mapping[str, np.ndarray], accuracies: Mapping[str, np.ndarray]
) -> Row:
  """Returns what one run came to.

  Args:
    curves: metrics by name, each `[steps]`.
    accuracies: held-out accuracies by name, each `[evaluations]`.

  Returns:
    With m the moving mean of the reward over WINDOW steps (fewer, if there are
    fewer):
      start_reward, end_reward, best_reward: first, last and largest m.
      the last of every accuracy, under its name.
      collapsed: 1.0 if m falls below half of its largest value so far, where
        that value is at least 0.1; else 0.0.
      collapse_step: the first step at which it does, or None.
      peak_grad_norm: largest finite norm.
      grad_norm_spread: standard deviation of log(norm / median of the norms
        within 15 steps), over the steps whose norm is finite and above 0.
      mismatch_first, mismatch_mean, mismatch_max: of mismatch_abs_logprob;
        mismatch_kl_max: of its k3.
      ref_kl_median, ref_kl, entropy, clip_fraction: means of the last WINDOW
        steps.
      skipped: number of skipped updates.
    A value that is not finite is None.
  """
  window = min(WINDOW, len(curves['reward']))
  m = _moving_mean(curves['reward'], window)
  best = np.maximum.accumulate(m)
  fallen = np.flatnonzero((m < best / 2) & (best >= _FLOOR))
  mismatch = curves['mismatch_abs_logprob']
  peak, spread = _grad_norm(curves['grad_norm'])
  row = {
      'start_reward': m[0],
      'end_reward': m[-1],
      'best_reward': best[-1],
      **{name: values[-1] for name, values in accuracies.items()},
      'collapsed': float(fallen.size > 0),
      'collapse_step': fallen[0] + window - 1 if fallen.size else None,
      'peak_grad_norm': peak,
      'grad_norm_spread': spread,
      'mismatch_first': mismatch[0],
      'mismatch_mean': mismatch.mean(),
      'mismatch_max': mismatch.max(),
      'mismatch_kl_max': curves['mismatch_kl'].max(),
      'skipped': curves['skipped'].sum(),
  }
  for name in ('ref_kl_median', 'ref_kl', 'entropy', 'clip_fraction'):
    row[name] = curves[name][-window:].mean()
  return {name: _json(value) for name, value in row.items()}


def table(rows: Sequence[Row]) -> list[Row]:
  """Returns one row for each scope, setting and recipe, in their order.

  Args:
    rows: of runs: `recipe`, `scope`, `setting`, `warm_start` and `seed`, and
      the values of `summarize`.

  Returns:
    Rows with `warm_starts` and `runs`, their numbers, and for every value NAME:
    the mean over warm starts of the mean over their runs, `NAME_interval`, half
    the width of its 95 % interval by Student's t, and `NAME_difference` and
    `NAME_difference_interval`, the same of the difference to the baseline from
    the same warm start. None where there is nothing to compute it from.
  """
  groups: dict[tuple[str, str, str], list[Row]] = {}
  for row in rows:
    key = (row['scope'], row['setting'], row['recipe'])
    groups.setdefault(key, []).append(row)
  labels = ('scope', 'setting', 'recipe', 'warm_start', 'seed', 'step')
  result = []
  for (scope, setting, recipe), runs in groups.items():
    base = groups.get((scope, setting, BASELINE), [])
    line: Row = {'scope': scope, 'setting': setting, 'recipe': recipe}
    line |= {
        'warm_starts': len({run['warm_start'] for run in runs}),
        'runs': len(runs),
    }
    for name in runs[0]:
      if name in (*labels, 'collapse_step'):
        continue
      own, other = _by_start(runs, name), _by_start(base, name)
      shared = sorted(own.keys() & other.keys())
      mean, interval = _interval_of(list(own.values()))
      line |= {name: mean, f'{name}_interval': interval}
      mean, interval = _interval_of([own[w] - other[w] for w in shared])
      if recipe != BASELINE:
        line[f'{name}_difference'] = mean
        line[f'{name}_difference_interval'] = interval
    result.append(line)
  return result


def text(lines: Sequence[Row]) -> str:
  """Returns the chief columns of a `table` for reading."""
  columns = {
      'end_reward': 'end reward',
      'pass_at_1': 'sampled',
      'greedy_accuracy': 'greedy',
  }
  plain = {
      'best_reward': 'best',
      'collapsed': 'collapsed',
      'peak_grad_norm': 'peak norm',
      'grad_norm_spread': 'spread',
      'mismatch_mean': 'mismatch',
      'ref_kl_median': 'ref KL',
  }
  head = ['scope', 'setting', 'recipe', 'starts', 'runs', columns['end_reward']]
  head += ['- bf16', *list(columns.values())[1:], *plain.values()]
  cells = [head]
  for line in lines:
    row = [line['scope'], line['setting'], line['recipe']]
    row += [str(line['warm_starts']), str(line['runs'])]
    row += [_interval(line, 'end_reward')]
    row += [_interval(line, 'end_reward_difference')]
    row += [_interval(line, name) for name in list(columns)[1:]]
    row += [_number(line[name]) for name in plain]
    cells.append(row)
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  return '\n'.join(
      '  '.join(cell.ljust(n) for cell, n in zip(row, widths, strict=True))
      for row in cells
  )


def _interval_of(values):
  """Returns the mean and half the width of its interval; None for neither."""
  if not values:
    return None, None
  mean, half_width = statistics.interval(values)
  return mean, _json(half_width)


def _interval(line, name):
  mean, interval = line.get(name), line.get(f'{name}_interval')
  if mean is None:
    return ''
  if interval is None:
    return f'{mean:.3f}'
  return f'{mean:.3f} +- {interval:.3f}'


def _number(value):
  return '' if value is None else f'{value:.3g}'


def _by_start(runs, name):
  """Returns the mean over runs of a value, by warm start."""
  values: dict[int, list[float]] = {}
  for run in runs:
    if run[name] is not None:
      values.setdefault(run['warm_start'], []).append(run[name])
  return {start: float(np.mean(items)) for start, items in values.items()}


def _moving_mean(values, window):
  sums = np.cumsum(np.concatenate([[0.0], values]))
  return (sums[window:] - sums[:-window]) / window


def _grad_norm(norms):
  """Returns the peak, and the spread around a local median."""
  finite = np.isfinite(norms)
  peak = norms[finite].max() if finite.any() else np.nan
  usable = np.where(finite & (norms > 0), norms, np.nan)
  ratios = [
      np.log(norm / np.nanmedian(usable[max(i - _LOCAL, 0) : i + _LOCAL + 1]))
      for i, norm in enumerate(usable)
      if np.isfinite(norm)
  ]
  return peak, np.std(ratios) if ratios else np.nan


def _json(value):
  if value is None or not np.isfinite(value):
    return None
  return value.item() if isinstance(value, np.generic) else value
