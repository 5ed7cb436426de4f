"""Which differences between learner and sampler cost how much mismatch.

    python -m experiments.mismatch_matrix smoke
    python -m experiments.mismatch_matrix tiny       # the demo's model; CPU
    python -m experiments.mismatch_matrix smollm2    # minutes on a GPU
    python -m experiments.mismatch_matrix resume runs/mismatch_matrix

A cell is a learner and a sampler, each a precision policy. The sampler
completes the task's problems, the learner runs the completions teacher-forced
with the same weights, and the gap is learner - sampler log-prob of each token.
Cells are grouped by cause: one thing differs at a time, then all.

A cell whose two sides are equal measures execution alone (0 where learner and
sampler have the same bits, which not every machine grants); one with a bf16
learner measures what the sampler's quantization does. Intervals are of means
over problems, 95 %, by Student's t; `over base` is the difference to the first
cell of the same cause, paired by problem. Rows go to metrics.jsonl, a table to
matrix.md, a picture to figures/.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import pathlib
import sys
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import grpo
from experiments import plots
from experiments import run
from experiments import sft
from experiments import statistics
from nvfp4_jax import diagnostics
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax import tasks
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import trace

# Mean |log-prob gap| that miniTE reports for step 0, dense and MoE, by
# (learner, sampler); which of the two comes first is inferred. The three with
# one activation format are of matched pairs.
PUBLISHED = {
    ('bf16', 'bf16'): (0.0110, 0.0172),
    ('nvfp4', 'nvfp4'): (0.1142, 0.0668),
    ('nvfp4', 'bf16'): (0.1376, 0.0621),
    ('bf16', 'nvfp4'): (0.1690, 0.0747),
    ('w4a16', 'w4a16'): (0.0139, 0.0166),
    ('w4a8', 'w4a8'): (0.0363, 0.0227),
}
_TRACED = 8  # problems
PUBLISHED_SOURCE = 'miniTE, "Diagnosing and Bridging the Execution Gap"'


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/mismatch_matrix')
  checkpoint: pathlib.Path | None = None  # a Hugging Face folder
  supervised: sft.Config = sft.Config(steps=200, save_interval=100)
  model: model_config.ModelConfig = dataclasses.replace(
      model_config.tiny(16), shared_expert_dim=32
  )  # of the warm start
  task: tasks.TaskConfig = tasks.TaskConfig()
  max_answer_tokens: int = 64  # of a task of text; others know their own
  scope: variants.Scope = 'all'  # what is quantized, but where it is the cause
  keep_layers: tuple[int, ...] = (1, 2)  # numbers of layers kept in bf16
  channel_shares: tuple[float, ...] = (0.0625, 0.125, 0.25)  # of QUADS
  causes: tuple[str, ...] = ()  # which; none for all
  prompts: int = 64
  batch: int = 64  # problems that are completed at a time
  temperature: float = 1.0
  seed: int = 0  # of warm start and sampling

  def __post_init__(self):
    sft.check_part(self.supervised)
    for name in ('prompts', 'batch'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')
    for cause in self.causes:
      if cause not in CAUSES:
        raise ValueError(f'Cause {cause!r} is not one of {CAUSES}.')


CAUSES = (
    'formats',
    'activations',
    'activation_scale',
    'four_over_six',
    'keep_last',
    'keep_first',
    'shared_experts',
    'kv_cache',
    'scope',
    'residual',
    'all',
)

PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/mismatch_smoke'),
            supervised=sft.SHORT,
            model=dataclasses.replace(
                model_config.tiny(16),
                num_layers=1,
                num_experts=0,
                experts_per_token=0,
                moe_dim=0,
                mlp_dim=64,
                attention_block=32,
            ),
            task=tasks.TaskConfig(digits=3),
            keep_layers=(1,),
            causes=('all',),
            prompts=4,
        ),
    ),
    'tiny': ("The demo's model with a shared expert; CPU.", Config()),
    'smollm2': (
        'SmolLM2-135M-Instruct adds numbers in chats.',
        Config(
            workdir=pathlib.Path('runs/mismatch_smollm2'),
            checkpoint=pathlib.Path('models/smollm2'),
            task=tasks.TaskConfig('chat_addition', digits=2),
            max_answer_tokens=32,
            keep_layers=(2, 4, 8),
        ),
    ),
}


class Cell(NamedTuple):
  """One learner and one sampler, by the names of their policies."""

  cause: str
  learner: str
  sampler: str


class Completed(NamedTuple):
  """What a sampler made of the problems, on the host, a row a problem."""

  tokens: np.ndarray
  mask: np.ndarray
  logprobs: np.ndarray


def main(cfg: Config, log: run.Log) -> None:
  """Measures the cells that have no row yet; table and picture."""
  start = load_start(cfg)
  policies = sides(cfg, start.model)
  cells = list(make_cells(cfg, start.model))
  done = {Cell(*(r[f] for f in Cell._fields)) for r in run.read_rows(log.path)}
  progress = run.Progress('cells', len(cells), len(done))
  for name, group in _by_sampler(cells, done):
    completed = complete(cfg, start, policies[name])
    for cell in group:
      logprobs = learn(cfg, start, policies[cell.learner], completed)
      row = cell._asdict() | measure(completed, logprobs)
      row['equal'] = policies[cell.learner] == policies[name]
      row['first_difference'] = _first_difference(
          cfg, start, policies[cell.learner], policies[name], row['max']
      )
      log(row)
      done.add(cell)
      progress(len(done), f'{cell.learner} / {name}: {row["mean"]:.4f}')
  rows = _in_order(cells, run.read_rows(log.path))
  table = make_table(rows)
  files.write_atomically(cfg.workdir / 'matrix.md', table)
  print(table)
  path = plots.mismatch_matrix(rows, PUBLISHED, cfg.workdir / 'figures')
  print(f'Figure: {path}', file=sys.stderr)


def sides(
    cfg: Config, model: model_config.ModelConfig
) -> dict[str, policy.PrecisionPolicy]:
  """Returns every precision policy by name."""

  def make(
      recipe: str, scope: variants.Scope = cfg.scope, **changes: Any
  ) -> policy.PrecisionPolicy:
    variant = variants.Variant(scope=scope, **changes)
    return variants.vary_policy(recipes.get(recipe).sampler, variant)

  def nvfp4(**changes: Any) -> policy.PrecisionPolicy:
    return make('nvfp4_high_precision', **changes)

  result = {
      'bf16': make('bf16'),
      'nvfp4': nvfp4(),
      'mxfp8': make('mxfp8_high_precision'),
      'w4a16': make('nvfp4_w4a16'),
      'w4a8': make('nvfp4_w4a8'),
      'per tensor': nvfp4(activation_scale='tensor'),
      '4/6 weights': nvfp4(four_over_six='weights'),
      '4/6 activations': nvfp4(four_over_six='activations'),
      '4/6 both': nvfp4(four_over_six='all'),
      'bf16, fp8 KV': make('bf16', kv_cache='fp8'),
      'nvfp4, fp8 KV': nvfp4(kv_cache='fp8'),
      'elements': make('resq'),
      'final': make('nvfp4_final'),
  }
  for count in _kept(cfg, model):
    fraction = count / model.num_layers
    result[f'last {count}'] = nvfp4(keep_last=fraction)
    result[f'first {count}'] = nvfp4(keep_first=fraction)
  for share in cfg.channel_shares:
    result[f'channels {share:g}'] = make('quads', residual_share=share)
  for scope in _scopes(model):
    result[f'nvfp4 {scope}'] = nvfp4(scope=scope)
  if model.shared_expert_dim:
    result['shared bf16'] = nvfp4(shared_experts=False)
  return result


def make_cells(cfg: Config, model: model_config.ModelConfig) -> Iterator[Cell]:
  """Yields the cells of the causes; the first of each is its base."""

  def both(cause, *names):
    """Each side with itself, and with a bf16 learner."""
    for name in names:
      yield Cell(cause, name, name)
      yield Cell(cause, 'bf16', name)

  kept = _kept(cfg, model)
  base = [('bf16', 'nvfp4'), ('nvfp4', 'nvfp4')]
  formats = ('bf16', 'nvfp4', 'mxfp8')
  pairs = {
      'formats': [*base]
      + [(a, b) for a in formats for b in formats if (a, b) not in base],
      'activations': [
          *base,
          ('w4a16', 'w4a16'),
          ('w4a8', 'w4a8'),
          ('bf16', 'w4a16'),
          ('bf16', 'w4a8'),
          ('w4a16', 'w4a8'),
          ('w4a16', 'nvfp4'),
      ],
      'activation_scale': [
          *base,
          ('per tensor', 'per tensor'),
          ('bf16', 'per tensor'),
          ('nvfp4', 'per tensor'),
      ],
      'kv_cache': [
          *base,
          ('bf16', 'bf16, fp8 KV'),
          ('bf16, fp8 KV', 'bf16, fp8 KV'),
          ('nvfp4', 'nvfp4, fp8 KV'),
          ('nvfp4, fp8 KV', 'nvfp4, fp8 KV'),
      ],
      'residual': [
          ('w4a16', 'nvfp4'),
          *(('w4a16', f'channels {share:g}') for share in cfg.channel_shares),
          ('w4a16', 'elements'),
          ('nvfp4', 'elements'),
          *base,
          *(('bf16', f'channels {share:g}') for share in cfg.channel_shares),
          ('bf16', 'elements'),
      ],
  }
  of_sides = {
      'four_over_six': ('4/6 weights', '4/6 activations', '4/6 both'),
      'keep_last': tuple(f'last {count}' for count in kept),
      'keep_first': tuple(f'first {count}' for count in kept),
      'scope': tuple(f'nvfp4 {scope}' for scope in _scopes(model)),
      'shared_experts': ('shared bf16',) if model.shared_expert_dim else (),
      'all': ('final',),
  }
  for cause in cfg.causes or CAUSES:
    if cause in pairs:
      yield from (Cell(cause, *pair) for pair in pairs[cause])
    elif of_sides[cause]:
      yield from (Cell(cause, *pair) for pair in base)
      yield from both(cause, *of_sides[cause])


def load_start(cfg: Config) -> grpo.Start:
  """Returns model, weights and task; a warm start is made if it is missing."""
  make = functools.partial(
      grpo.Config, workdir=cfg.workdir, task=cfg.task, seed=cfg.seed
  )
  if cfg.checkpoint is None:
    settings = make(supervised=cfg.supervised, model=cfg.model)
  else:
    settings = make(
        checkpoint=cfg.checkpoint, max_answer_tokens=cfg.max_answer_tokens
    )
  return grpo.load_start(settings)


def complete(
    cfg: Config, start: grpo.Start, precision_policy: policy.PrecisionPolicy
) -> Completed:
  """Returns what a sampler under this policy makes of the problems."""
  quantizer, tree = stacked(start, precision_policy)
  settings = rollouts.RolloutConfig(cfg.prompts, 1, cfg.temperature)
  parts = []
  for first in range(0, cfg.prompts, cfg.batch):
    problems = [
        start.task.problem('held_out', first + i)
        for i in range(min(cfg.batch, cfg.prompts - first))
    ]
    completions = rollouts.complete(
        start.model,
        settings,
        start.task,
        quantizer,
        tree,
        problems,
        rollouts.step_key(cfg.seed, first),
        cfg.temperature,
    )
    parts.append(_on_host(completions))
  return _join(parts)


def learn(
    cfg: Config,
    start: grpo.Start,
    precision_policy: policy.PrecisionPolicy,
    completed: Completed,
) -> np.ndarray:
  """Returns the log-probs `[B, T]` of a learner under this policy."""
  quantizer, tree = stacked(start, precision_policy)
  parts = [
      learner.logprobs(
          start.model,
          tree,
          quantizer,
          tree,
          jnp.asarray(completed.tokens[i : i + cfg.batch]),
          cfg.temperature,
      )
      for i in range(0, cfg.prompts, cfg.batch)
  ]
  return np.concatenate([np.asarray(part) for part in parts])


def stacked(
    start: grpo.Start, precision_policy: policy.PrecisionPolicy
) -> tuple[policy.Quantizer, policy.ParamTree]:
  """Returns the quantizer, and the tree that it runs."""
  quantizer = policy.Quantizer(precision_policy)
  paths = transformer.param_paths(start.model)
  segments = policy.segments([precision_policy], paths)
  masters = transformer.stack(start.params, segments)
  tree = policy.quantize_params(quantizer, masters, dtype=start.model.dtype)
  return quantizer, tree


def sample(
    cfg: Config,
    start: grpo.Start,
    quantizer: policy.Quantizer,
    tree: policy.ParamTree,
) -> trace.Sampled:
  """Returns completions of the first few problems, to be traced."""
  problems = [
      start.task.problem('held_out', i)
      for i in range(min(cfg.prompts, _TRACED))
  ]
  settings = sampler.SampleConfig(
      start.task.max_answer_tokens, start.task.eos_ids, cfg.temperature
  )
  return trace.sample(
      start.model,
      tree,
      quantizer,
      [problem.prompt for problem in problems],
      rollouts.step_key(cfg.seed, 0),
      settings,
  )


def measure(completed: Completed, logprobs: np.ndarray) -> dict[str, Any]:
  """Returns the numbers of a cell.

  Args:
    completed: tokens and log-probs of the sampler, `[B, T]`.
    logprobs: the learner's, `[B, T]`.

  Returns:
    `per_prompt`, each problem's mean |gap|; their `mean` and `half_width`, of
    its interval; `token_mean` and `max` of |gap| over tokens; `k1` =
    mean(sampler - learner) and `k3`, both estimates of KL(sampler || learner);
    `equal_tokens`, the share without any gap; `tokens`.
  """
  mask = completed.mask
  gap = np.where(mask, logprobs - completed.logprobs, 0.0).astype(np.float64)
  per_prompt = np.abs(gap).sum(1) / np.maximum(mask.sum(1), 1)
  mean, half_width = statistics.interval(per_prompt)
  k3 = diagnostics.kl_k3(
      jnp.asarray(logprobs),
      jnp.asarray(completed.logprobs),
      jnp.asarray(mask),
  )
  return {
      'mean': mean,
      'half_width': half_width,
      'token_mean': float(np.abs(gap[mask]).mean()),
      'max': float(np.abs(gap[mask]).max()),
      'k1': float(0.0 - gap[mask].mean()),
      'k3': float(k3),
      'equal_tokens': float((gap[mask] == 0).mean()),
      'tokens': int(mask.sum()),
      'per_prompt': [float(x) for x in per_prompt],
  }


def make_table(rows: Sequence[Mapping[str, Any]]) -> str:
  """Returns the rows as a Markdown table."""
  lines = [
      '| cause | learner | sampler | mean gap | over base | max | k1 | k3'
      ' | parts at | published, dense / MoE |',
      '|---|---|---|---|---|---|---|---|---|---|',
  ]
  bases = {}
  for row in rows:
    base = bases.setdefault(row['cause'], row)
    over = ''
    if row is not base:
      gaps = [np.array(r['per_prompt']) for r in (row, base)]
      mean, half_width = statistics.interval(gaps[0] - gaps[1])
      over = f'{mean:+.4f} ± {half_width:.4f}'
    published = PUBLISHED.get((row['learner'], row['sampler']), ())
    lines.append(
        f'| {row["cause"]} | {row["learner"]} | {row["sampler"]}'
        f' | {row["mean"]:.4f} ± {row["half_width"]:.4f} | {over}'
        f' | {row["max"]:.2f} | {row["k1"]:.4f} | {row["k3"]:.4f}'
        f' | {row["first_difference"] or ""}'
        f' | {" / ".join(f"{value:.4f}" for value in published)} |'
    )
  return '\n'.join([*lines, '', f'Published: {PUBLISHED_SOURCE}.', ''])


def _first_difference(cfg, start, learner_policy, sampler_policy, largest):
  """Returns where learner and sampler part, or None if they do not.

  Where the policies differ, they say it; else a few completions are traced.
  """
  pair = recipes.Recipe('', learner_policy, sampler_policy, source='')
  paths = transformer.param_paths(start.model)
  unequal = recipes.differences(pair, paths)
  if unequal:
    path, what = next(iter(unequal.items()))
    return f'{path}: {what}'
  if not largest:
    return None
  quantizer, tree = stacked(start, learner_policy)
  sampled = sample(cfg, start, quantizer, tree)
  learned = trace.trace_learner(start.model, tree, quantizer, tree, sampled)
  replayed = trace.trace_sampler(start.model, tree, quantizer, sampled)
  for found in trace.differences(learned, replayed, sampled):
    if found.first is not None:
      position, row = found.first
      return f'{found.stage}, token {position} of row {row}'
  return None


def _kept(cfg, model):
  return [count for count in cfg.keep_layers if count < model.num_layers]


def _scopes(model) -> tuple[variants.Scope, ...]:
  return ('experts', 'mlp', 'all') if model.num_experts else ('mlp', 'all')


def _by_sampler(cells, done):
  """Yields samplers, and the cells of each that are not done."""
  for name in dict.fromkeys(cell.sampler for cell in cells):
    group = [c for c in cells if c.sampler == name and c not in done]
    if group:
      yield name, group


def _in_order(cells, rows):
  by_cell = {Cell(*(row[f] for f in Cell._fields)): row for row in rows}
  return [by_cell[cell] for cell in cells]


def _on_host(completions: sampler.Completions) -> Completed:
  arrays = (completions.tokens, completions.mask, completions.logprobs)
  return Completed(*map(np.asarray, arrays))


def _join(parts):
  """Joins batches, whose rows may differ in length."""
  length = max(part.tokens.shape[1] for part in parts)
  pad = lambda x: np.pad(x, ((0, 0), (0, length - x.shape[1])))
  return Completed(
      *(np.concatenate([pad(x) for x in xs]) for xs in zip(*parts, strict=True))
  )


if __name__ == '__main__':
  run.launch(main, PRESETS)
