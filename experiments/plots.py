"""Figures, drawn from the rows of metrics.jsonl and from nothing else."""

from collections.abc import Mapping
import pathlib

import matplotlib

matplotlib.use('agg')  # before pyplot: no display is needed

import matplotlib.pyplot as plt
import numpy as np

from experiments import run

_SMOOTHING = 5


def grpo(
    workdirs: Mapping[str, pathlib.Path], folder: pathlib.Path
) -> pathlib.Path:
  """Draws reward, held-out accuracy and mismatch of GRPO runs.

  Args:
    workdirs: each run's folder, by the name of its recipe.
    folder: where `grpo.png` is written.

  Returns:
    The picture's path.
  """
  rows = {name: _rows(workdir) for name, workdir in workdirs.items()}
  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout='constrained')
  for name, run_rows in rows.items():
    steps = [row['step'] for row in run_rows]
    reward = _smooth([row['reward'] for row in run_rows])
    axes[0].plot(steps, reward, label=name)
    scored = [row for row in run_rows if 'greedy_accuracy' in row]
    at = [row['step'] for row in scored]
    line = axes[1].plot(at, [r['greedy_accuracy'] for r in scored], label=name)
    axes[1].plot(
        at, [r['pass_at_1'] for r in scored], ':', color=line[0].get_color()
    )
    axes[2].plot(
        steps, [row['mismatch_abs_logprob'] for row in run_rows], label=name
    )
  _label(axes[0], 'reward', f'mean of {_SMOOTHING} rollouts')
  _label(axes[1], 'held-out accuracy', 'greedy (solid), sampled (dotted)')
  _label(axes[2], 'mismatch', 'mean |log-prob gap|, nats')
  axes[0].legend(frameon=False)
  return _save(figure, folder / 'grpo.png')


def _rows(workdir):
  rows = run.read_rows(workdir / 'metrics.jsonl')
  if not rows:
    raise ValueError(f'{workdir}/metrics.jsonl holds no rows.')
  return rows


def _smooth(values):
  """Returns the mean of the last few values at each point."""
  sums = np.cumsum([0.0, *values])
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(ends - _SMOOTHING, 0)
  return (sums[ends] - sums[starts]) / (ends - starts)


def _label(axis, title, ylabel):
  axis.set(title=title, xlabel='rollout', ylabel=ylabel)
  axis.grid(alpha=0.3)


def _save(figure, path):
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
  plt.close(figure)
  return path
