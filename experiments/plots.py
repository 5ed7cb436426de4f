"""Figures, drawn from what runs have written and from nothing else.

    python -m experiments.plots --runs results/demo/seed* --folder=results/demo

draws one picture of several runs of the demo, a line each and their mean.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import itertools
import json
import pathlib
from typing import Any

import matplotlib

matplotlib.use('agg')  # before pyplot: no display is needed

from matplotlib import figure as figure_lib
import matplotlib.pyplot as plt
import numpy as np
import tyro

from experiments import run

_SMOOTHING = 5


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  runs: tuple[pathlib.Path, ...]  # workdirs of experiments.grpo
  folder: pathlib.Path  # where grpo.png is written


def main(cfg: Config) -> None:
  """Draws `grpo` of runs and of the runs in their subfolders."""
  workdirs: dict[str, list[pathlib.Path]] = {}
  for workdir in cfg.runs:
    for path in sorted(workdir.glob('**/config.json')):
      recipe = json.loads(path.read_text()).get('recipe')
      if recipe is not None:  # a warm start has none
        workdirs.setdefault(recipe, []).append(path.parent)
  print(grpo(workdirs, cfg.folder))


def grpo(
    workdirs: Mapping[str, Sequence[pathlib.Path]], folder: pathlib.Path
) -> pathlib.Path:
  """Draws reward, held-out accuracy and mismatch of GRPO runs.

  Args:
    workdirs: the folders of each recipe's runs, one for each seed.
    folder: where `grpo.png` is written.

  Returns:
    The picture's path.
  """
  figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout='constrained')
  for i, (name, folders) in enumerate(workdirs.items()):
    rows = [_rows(workdir) for workdir in folders]
    scored = [[r for r in seed if 'greedy_accuracy' in r] for seed in rows]
    color = f'C{i}'
    _curves(axes[0], rows, 'reward', color, smooth=True, label=name)
    _curves(axes[1], scored, 'greedy_accuracy', color)
    _curves(axes[1], scored, 'pass_at_1', color, style=':')
    _curves(axes[2], rows, 'mismatch_abs_logprob', color)
  _label(axes[0], 'reward', f'mean of {_SMOOTHING} rollouts')
  _label(axes[1], 'held-out accuracy', 'greedy (solid), sampled (dotted)')
  _label(axes[2], 'mismatch', 'mean |log-prob gap|, nats')
  axes[0].legend(frameon=False)
  return save(figure, folder / 'grpo.png')


def quantization_error(
    workdir: pathlib.Path, folder: pathlib.Path
) -> pathlib.Path:
  """Draws grids, SQNR, parts of the error and leaks of one run."""
  rows = _rows(workdir)
  of_kind = lambda kind: [row for row in rows if row['kind'] == kind]
  figure, axes = plt.subplots(1, 4, figsize=(15, 4), layout='constrained')
  for i, row in enumerate(of_kind('grid')):
    values = np.array(row['values'])
    axes[0].plot(values, np.full(values.shape, i), '|', markersize=12)
    text = f'{row["name"]}: worst error 1/{1 / row["worst_error"]:.3g}'
    axes[0].text(0, i + 0.2, text)
  axes[0].set(title='values of a block / amax', yticks=[], ylim=(-0.5, 2.6))

  errors = of_kind('error')
  names = list(dict.fromkeys(row['name'] for row in errors))
  distributions = list(dict.fromkeys(row['distribution'] for row in errors))
  width = 0.8 / len(distributions)
  for i, distribution in enumerate(distributions):
    sqnr = [
        [r['sqnr_db'] for r in errors if _is(r, n, distribution)] for n in names
    ]
    at = np.arange(len(names)) + i * width - 0.4 + width / 2
    axes[1].barh(at, np.mean(sqnr, axis=1), width, label=distribution)
  axes[1].set(title='SQNR, dB', yticks=range(len(names)), yticklabels=names)
  axes[1].legend(frameon=False, fontsize=7)

  left = np.zeros(len(names))
  for part in ('scale_bias', 'deadzone', 'grid_noise'):
    share = np.array(
        [
            np.mean([r[part] for r in errors if _is(r, n, 'normal')])
            for n in names
        ]
    )
    axes[2].barh(names, share, left=left, label=part)
    left += share
  axes[2].set(title='parts of the error, squared / x^2 (normal)', yticks=[])
  axes[2].legend(frameon=False)

  leaks = of_kind('leak')
  for name in dict.fromkeys(row['name'] for row in leaks):
    line = [(r['growth'], r['changed']) for r in leaks if r['name'] == name]
    axes[3].plot(*zip(*line, strict=True), 'o-', label=name)
  axes[3].set(
      title='other tokens: changed values',
      xlabel='growth of one token',
      xscale='log',
  )
  axes[3].legend(frameon=False)
  return save(figure, folder / 'quantization_error.png')


def backward_modes(workdir: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Draws gradient errors and memory of one run."""
  rows = _rows(workdir)
  modes = list(dict.fromkeys(row['mode'] for row in rows))
  mean = lambda key: [
      np.mean([row[key] for row in rows if row['mode'] == mode])
      for mode in modes
  ]
  figure, axes = plt.subplots(1, 3, figsize=(13, 3.6), layout='constrained')
  at = np.arange(len(modes))
  for axis, kind in ((axes[0], 'error'), (axes[1], 'inconsistency')):
    for shift, gradient in ((-0.2, 'dgrad'), (0.2, 'wgrad')):
      axis.barh(at + shift, mean(f'{gradient}_{kind}'), 0.4, label=gradient)
    axis.legend(frameon=False)
  axes[0].set(
      title='gradient error, of the float32 layer', yticks=at, yticklabels=modes
  )
  axes[1].set(title='... and of the function that fprop computed', yticks=[])
  left = np.zeros(len(modes))
  for kind in ('activation', 'weight'):
    mib = np.array(mean(f'{kind}_bytes')) / 2**20
    axes[2].barh(modes, mib, left=left, label=f'{kind}s')
    left += mib
  axes[2].set(title='kept for the backward pass, MiB', yticks=[])
  axes[2].legend(frameon=False)
  return save(figure, folder / 'backward_modes.png')


def mismatch_matrix(
    rows: Sequence[Mapping[str, Any]],
    published: Mapping[tuple[str, str], tuple[float, float]],
    folder: pathlib.Path,
) -> pathlib.Path:
  """Draws the mean |log-prob gap| of every cell, a panel a cause.

  Args:
    rows: of experiments.mismatch_matrix, in the order of its cells.
    published: gaps of a dense model and a mixture of experts that others
      report, by learner and sampler.
    folder: where `mismatch_matrix.png` is written.

  Returns:
    The picture's path.
  """
  causes = list(dict.fromkeys(row['cause'] for row in rows))
  columns = min(3, len(causes))
  count = -(-len(causes) // columns)
  figure, axes = plt.subplots(
      count,
      columns,
      figsize=(5 * columns, 2.6 * count),
      layout='constrained',
      squeeze=False,
      sharex=True,
  )
  for axis in axes.flat[len(causes) :]:
    axis.remove()
  for axis, cause in zip(axes.flat, causes, strict=False):
    cells = [row for row in rows if row['cause'] == cause][::-1]
    axis.barh(
        range(len(cells)),
        [row['mean'] for row in cells],
        xerr=[row['half_width'] for row in cells],
        color=['C0' if row['equal'] else 'C1' for row in cells],
    )
    for i, row in enumerate(cells):
      gap = row['mean']
      text = f' {gap:.3f}' if gap else ' 0'
      axis.text(gap + row['half_width'], i, text, va='center', fontsize=6)
      others = published.get((row['learner'], row['sampler']), ())
      axis.plot(others, [i] * len(others), 'kD', markersize=3)
    axis.set(
        title=cause,
        yticks=range(len(cells)),
        yticklabels=[f'{r["learner"]} / {r["sampler"]}' for r in cells],
        xlim=(0, None),
    )
    axis.tick_params(axis='y', labelsize=7)
    axis.margins(x=0.12)
    axis.grid(alpha=0.3, axis='x')
  figure.supxlabel(
      'mean |learner - sampler log-prob|, nats; learner / sampler, blue where'
      ' they are equal; diamonds: published, dense and MoE',
      fontsize=9,
  )
  return save(figure, folder / 'mismatch_matrix.png')


def layer_precision(
    rows: Sequence[Mapping[str, Any]], folder: pathlib.Path
) -> pathlib.Path:
  """Draws what each layer's quantization costs, and what keeping ends saves.

  Args:
    rows: of experiments.layer_precision.
    folder: where `layer_precision.png` is written.

  Returns:
    The picture's path.
  """
  of_kind = lambda kind: [row for row in rows if row['kind'] == kind]
  figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), layout='constrained')
  (whole,) = of_kind('all')
  for kind, style in (('only', 'o-'), ('but', 's-')):
    cases = of_kind(kind)
    axes[0].errorbar(
        [row['layers'] for row in cases],
        [row['mean'] for row in cases],
        yerr=[row['half_width'] for row in cases],
        fmt=style,
        label={'only': 'this layer alone', 'but': 'all but this'}[kind],
    )
  axes[0].axhline(whole['mean'], color='gray', label='all layers')
  axes[0].set(
      title='quantized', xlabel='layer', ylabel='mean |log-prob gap|, nats'
  )
  axes[0].legend(frameon=False)
  names, saved = [], []
  for kind in ('last', 'first', 'shared_experts'):
    for row in of_kind(kind):
      number = '' if kind == 'shared_experts' else f' {row["layers"]}'
      names.append(f'{kind.replace("_", " ")}{number}')
      saved.append(row['saved'])
  axes[1].barh(names[::-1], saved[::-1])
  axes[1].set(title='kept in bfloat16', xlabel='share of the gap that is saved')
  axes[1].grid(alpha=0.3, axis='x')
  return save(figure, folder / 'layer_precision.png')


def recipe_sweep(workdir: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
  """Draws a sweep's reward, and each recipe's difference to the baseline.

  Two rows for each scope, a column for each setting: means over all runs of a
  recipe above, below the difference of the end rewards from the same warm
  starts with its 95 % interval over warm starts.
  """
  curves = np.load(workdir / 'curves.npz')
  table = json.loads((workdir / 'table.json').read_text())
  scopes, settings, names = (
      list(dict.fromkeys(row[label] for row in table))
      for label in ('scope', 'setting', 'recipe')
  )
  figure, axes = plt.subplots(
      2 * len(scopes),
      len(settings),
      figsize=(4 * len(settings), 6 * len(scopes)),
      layout='constrained',
      squeeze=False,
      sharey='row',
  )
  for at, (scope, setting) in enumerate(itertools.product(scopes, settings)):
    row, column = divmod(at, len(settings))
    top, bottom = axes[2 * row : 2 * row + 2, column]
    for i, name in enumerate(names):
      chosen = curves['recipe'] == name
      chosen &= (curves['scope'] == scope) & (curves['setting'] == setting)
      mean = _smooth(curves['reward'][chosen].mean(axis=0))
      top.plot(mean, color=f'C{i}', label=name)
      place = {'scope': scope, 'setting': setting, 'recipe': name}
      for row in table:
        if place.items() <= row.items():
          bottom.errorbar(
              row.get('end_reward_difference') or 0.0,
              -i,
              xerr=row.get('end_reward_difference_interval') or 0.0,
              fmt='o',
              markersize=4,  # short intervals are seen
              color=f'C{i}',
          )
    _label(top, f'{scope}, {setting}', '' if column else 'reward')
    bottom.axvline(0.0, color='gray', linewidth=0.8)
    bottom.set(
        xlabel='end reward, less that of bf16',
        yticks=[-i for i in range(len(names))],
        yticklabels=names,
    )
    bottom.locator_params(axis='x', nbins=7, steps=[1, 2, 5, 10])
    bottom.grid(alpha=0.3)
  axes[0, 0].legend(frameon=False, fontsize=7)
  return save(figure, folder / 'recipe_sweep.png')


def _is(row, name, distribution):
  return row['name'] == name and row['distribution'] == distribution


def _curves(axis, seeds, key, color, *, style='-', smooth=False, label=None):
  """Draws a value of each seed, thin, and the mean over seeds."""
  steps = [row['step'] for row in seeds[0]]
  values = np.array([[row[key] for row in rows] for rows in seeds])
  if smooth:
    values = np.array([_smooth(line) for line in values])
  if len(seeds) > 1:
    axis.plot(steps, values.T, style, color=color, alpha=0.25, linewidth=0.8)
  axis.plot(steps, values.mean(0), style, color=color, label=label)


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


def save(figure: figure_lib.Figure, path: pathlib.Path) -> pathlib.Path:
  """Writes a figure and closes it; returns the path."""
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=150)
  plt.close(figure)
  return path


if __name__ == '__main__':
  main(tyro.cli(Config, use_underscores=True))
