"""Figures of the simulator, drawn from rows and from nothing else."""

from collections.abc import Mapping, Sequence
import pathlib
from typing import Any

from matplotlib import colors
import matplotlib.pyplot as plt
import numpy as np

from experiments import plots  # before a figure: needs no display

_Rows = Sequence[Mapping[str, Any]]
_COLORS = {
    'bf16': 'C0',
    'mxfp8': 'C2',
    'nvfp4': 'C3',
    'nvfp4, all three': 'C1',
}
_SYMBOLS = {
    'staleness': 'staleness (s of lag 1)',
    'staleness_power': 'its power of the lag',
    'capacity': 'capacity c',
    'drift_gain': 'drift gain gamma',
    'drift_decay': '1 - rho of the drift, rho',
    'amplification': 'amplification eta',
    'drift_threshold': 'drift threshold D*',
    'damage': 'damage b',
    'learning': 'learning a',
    'shared_experts_factor': 'shared experts, factor',
}


def runs(rows: _Rows, folder: pathlib.Path) -> pathlib.Path:
  """Draws lag, mismatch, drift and reward by update; returns the path."""
  panels = {
      'lag_mean': 'lag, updates',
      'mismatch': 'mismatch m, nats',
      'drift': 'drift D, nats',
      'reward': 'reward',
  }
  figure, axes = plt.subplots(1, 4, figsize=(15, 3.6), layout='constrained')
  systems = list(dict.fromkeys(row['system'] for row in rows))
  for axis, (key, label) in zip(axes, panels.items(), strict=True):
    for i, system in enumerate(systems):
      points = [
          (row['update'], row[key])
          for row in rows
          if row['kind'] == 'update' and row['system'] == system
      ]
      style = '--' if i % 2 else '-'
      axis.plot(*zip(*points, strict=True), style, label=system, color=f'C{i}')
    axis.set(xlabel='update', ylabel=label)
    axis.grid(alpha=0.3)
  axes[2].set_ylim(0, 4)
  axes[2].axhline(2, color='k', linewidth=0.8)
  axes[2].text(0, 2.05, 'D*: above it reward suffers', fontsize=7)
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside right center')
  return plots.save(figure, folder / 'run.png')


def trade(sweep: _Rows, frontier: _Rows, folder: pathlib.Path) -> pathlib.Path:
  """Draws what asynchrony does at four precisions, and the Pareto fronts.

  Args:
    sweep: rows of the preset of that name.
    frontier: likewise.
    folder: where `trade.png` is written.

  Returns:
    The picture's path.
  """
  panels = {
      'tokens_per_second': 'trained tokens/s, thousands',
      'lag_mean': 'lag, updates',
      'max_drift': 'largest drift D, nats',
      'final_reward': 'final reward',
  }
  figure, axes = plt.subplots(2, 3, figsize=(13, 6.6), layout='constrained')
  places = [axes[0, 0], axes[0, 1], axes[0, 2], axes[1, 0]]
  for axis, (key, label) in zip(places, panels.items(), strict=True):
    for system, color in _COLORS.items():
      chosen = [r for r in sweep if r['system'] == system]
      chosen = [r for r in chosen if r['knob'] == 'max_staleness']
      scale = 1e-3 if key == 'tokens_per_second' else 1
      values = [scale * row[key] for row in chosen]
      x = [row['value'] for row in chosen]
      axis.plot(x, values, 'o-', color=color, label=system, markersize=3)
    axis.set(xlabel='max_staleness K', ylabel=label)
    axis.grid(alpha=0.3)
  axes[0, 2].set_ylim(0, 3)
  axes[0, 2].axhline(2, color='k', linewidth=0.8)
  axes[0, 2].text(0, 2.05, 'D*', fontsize=8)
  axes[0, 0].legend(frameon=False, fontsize=8)
  _utilization(axes[1, 1], sweep)
  _front(axes[1, 2], frontier)
  return plots.save(figure, folder / 'trade.png')


def _utilization(axis, sweep):
  """Draws how busy samplers and trainer are."""
  for system in ('bf16', 'nvfp4'):
    chosen = [row for row in sweep if row['system'] == system]
    chosen = [row for row in chosen if row['knob'] == 'max_staleness']
    x = [row['value'] for row in chosen]
    for key, style in (('sampler', '--'), ('trainer', '-')):
      values = [row[f'{key}_utilization'] for row in chosen]
      axis.plot(
          x, values, style, color=_COLORS[system], label=f'{system} {key}'
      )
  axis.set(
      xlabel='max_staleness K', ylabel='busy share of time', ylim=(0, 1.05)
  )
  axis.legend(frameon=False, fontsize=8)
  axis.grid(alpha=0.3)


def _front(axis, rows):
  """Draws sampled systems, fronts and the best stable system of each."""
  for system, color in _COLORS.items():
    of = [row for row in rows if row.get('of') == system]
    for kind, style in (('sample', '.'), ('front', '-'), ('best_stable', '*')):
      chosen = [row for row in of if row['kind'] == kind]
      x = [row['tokens_per_second'] / 1e3 for row in chosen]
      y = [row['margin'] for row in chosen]
      size = {'.': 2, '-': 0, '*': 14}[style]
      alpha = 0.35 if kind == 'sample' else 1
      axis.plot(x, y, style, color=color, markersize=size, alpha=alpha)
  axis.axhline(0, color='k', linewidth=0.8)
  axis.set(
      xlabel='trained tokens/s, thousands',
      ylabel='margin D* - max D, nats',
      ylim=(-1, 2.1),
      title='random systems, fronts; stars: fastest stable',
  )
  axis.title.set_fontsize(9)
  axis.grid(alpha=0.3)


def story_range(rows: _Rows, folder: pathlib.Path) -> pathlib.Path:
  """Draws over which constants the default story holds; returns the path."""
  figure, (left, right) = plt.subplots(
      1, 2, figsize=(11.5, 4.2), layout='constrained', width_ratios=(1.4, 1)
  )
  constants = [row for row in rows if row['kind'] == 'constant'][::-1]
  for i, row in enumerate(constants):
    if row['held'] is None:
      continue
    low, high = row['held']
    left.barh(i, high - low, left=low, color='C1', height=0.6)
    for x, why, side in zip(
        (low, high), row['first_to_fail'], ('right', 'left'), strict=True
    ):
      text = {None: 'no limit seen', 'naive survives': 'naive survives'}.get(
          why, 'stabilized falls'
      )
      pad = 0.97 if side == 'right' else 1.03
      left.text(x * pad, i, text, ha=side, va='center', fontsize=7)
  left.axvline(1, color='k', linewidth=0.8)
  left.set_xscale('log', base=2)
  left.set(
      xlim=(1 / 20, 20),
      yticks=range(len(constants)),
      yticklabels=[
          f'{_SYMBOLS[row["constant"]]} = {row["default"]:g}'
          for row in constants
      ],
      xlabel='factor on the default',
      title='where nvfp4 collapses and all three stabilizers save it',
  )
  _map(right, [row for row in rows if row['kind'] == 'map'])
  return plots.save(figure, folder / 'range.png')


def _map(axis, rows):
  """Draws the story by staleness and capacity."""
  x = sorted({row['staleness'] for row in rows})
  y = sorted({row['capacity'] for row in rows})
  grid = np.zeros((len(y), len(x)))
  for row in rows:
    value = 2 if not row['stabilized_holds'] else int(row['naive_collapses'])
    grid[y.index(row['capacity']), x.index(row['staleness'])] = value
  palette = colors.ListedColormap(['#9ecae1', 'C1', '#444444'])
  axis.pcolormesh(x, y, grid, cmap=palette, vmin=0, vmax=2, shading='nearest')
  axis.plot(1, 1, 'w*', markersize=12)
  axis.set_xscale('log', base=2)
  axis.set_yscale('log', base=2)
  axis.set(
      xlabel='factor on staleness',
      ylabel='factor on capacity',
      title='blue: both survive; orange: the story; grey: both fall',
  )
  axis.title.set_fontsize(9)


def replays(
    rows: _Rows, predictions: Mapping[int, Any], folder: pathlib.Path
) -> pathlib.Path:
  """Draws lag, mismatch and reward of replayed schedules, and predictions.

  Args:
    rows: of `experiments.async_drift`.
    predictions: `drift_model.Curves` by bound on staleness.
    folder: where `async_drift.png` is written.

  Returns:
    The picture's path.
  """
  panels = {
      'lag': ('lag, updates', None),
      'mismatch_abs_logprob': ('mismatch m, nats', 'mismatch'),
      'reward': ('reward', 'reward'),
  }
  figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout='constrained')
  for axis, (key, (label, predicted)) in zip(axes, panels.items(), strict=True):
    for i, (bound, curves) in enumerate(predictions.items()):
      values = [row[key] for row in rows if row['bound'] == bound]
      axis.plot(
          values, color=f'C{i}', alpha=0.8, label=f'K = {bound}, measured'
      )
      if predicted:
        values = getattr(curves, predicted)
        axis.plot(values, '--', color=f'C{i}', label=f'K = {bound}, predicted')
    axis.set(xlabel='update', ylabel=label)
    axis.grid(alpha=0.3)
  handles, labels = axes[1].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside right center')
  return plots.save(figure, folder / 'async_drift.png')
