"""Whether learner, sampler, export and reload are one policy, bit for bit.

    python -m experiments.consistency smoke
    python -m experiments.consistency tiny --recipe=nvfp4_naive
    python -m experiments.consistency smollm2 --prompts=4
    python -m experiments.consistency tiny --warm_start=runs/demo/warm_start

Weights: the arrays of the learner's jitted quantizer, of the sampler's tree,
and of a reload of its export in each layout that can hold it.

Activations: the sampler answers some prompts. On these tokens the learner's
teacher-forced forward pass and a replay of the sampler (prefill, decode steps)
are compared array by array, in the order of computation (`rl.trace`).

Log-probs: the learner's and the replay's against those that were sampled, and
the traced programs' against those without a trace.

metrics.jsonl gets every number, stdout tables and the first difference. The
exit code is 0 if there is none, 1 if there is one.
"""

import collections
from collections.abc import Iterator, Sequence
import dataclasses
import itertools
import pathlib
import tempfile
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run
from experiments import sft
from nvfp4_jax import config as config_json
from nvfp4_jax import diagnostics
from nvfp4_jax import export
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import recipes
from nvfp4_jax import sampler
from nvfp4_jax import tasks
from nvfp4_jax import tokenizer
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import layouts
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import text_tasks
from nvfp4_jax.rl import trace

type Row = dict[str, Any]
type _Table = list[tuple[str, ...]]

_DIFFERENT = 1  # exit code

_jitted_quantizer = jax.jit(policy.quantize_params, static_argnames='dtype')


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/consistency')
  recipe: str = 'nvfp4_final'
  checkpoint: pathlib.Path | None = None  # a Hugging Face folder
  warm_start: pathlib.Path | None = None  # a workdir of experiments.sft
  model: model_config.ModelConfig = model_config.tiny(16)  # without either
  task: tasks.TaskConfig = tasks.TaskConfig()  # a warm start has its own
  prompts: int = 8  # held-out problems
  max_new_tokens: int = 16
  seed: int = 0  # of sampling, and of a model without checkpoint

  def __post_init__(self):
    recipes.get(self.recipe)
    if self.checkpoint is not None and self.warm_start is not None:
      raise ValueError('Give checkpoint or warm_start, not both.')
    if (self.checkpoint is None) == self.task.is_text:
      raise ValueError(
          f'Task {self.task.name!r} and checkpoint {self.checkpoint}: tasks of'
          ' text need a checkpoint, and only they.'
      )
    if self.prompts < 1:
      raise ValueError(f'prompts {self.prompts} is below 1.')


PRESETS = {
    'smoke': (
        'A dense model; a minute on a CPU. Run by the tests.',
        Config(
            workdir=pathlib.Path('runs/consistency_smoke'),
            model=dataclasses.replace(
                model_config.tiny(16),
                num_layers=2,
                mlp_dim=64,
                num_experts=0,
                experts_per_token=0,
                moe_dim=0,
            ),
            task=tasks.TaskConfig(digits=3),
            prompts=3,
            max_new_tokens=4,
        ),
    ),
    'tiny': ('A random mixture of experts with four layers.', Config()),
    'smollm2': (
        'SmolLM2-135M-Instruct adds numbers in chats; minutes on a CPU.',
        Config(
            workdir=pathlib.Path('runs/consistency_smollm2'),
            checkpoint=pathlib.Path('models/smollm2'),
            task=tasks.TaskConfig('chat_addition', digits=2),
        ),
    ),
}


@dataclasses.dataclass(frozen=True)
class Sides:
  """Two sides of one policy, and what they are asked.

  Attributes:
    model: the model.
    recipe: the recipe.
    masters: the learner's, stacked float32.
    learner: `quantize_params` of them, jitted, under the learner's policy.
    sampler: `quantize_params` of them under the sampler's: what it runs.
    task: has the prompts.
  """

  model: model_config.ModelConfig
  recipe: recipes.Recipe
  masters: policy.ParamTree
  learner: policy.ParamTree
  sampler: policy.ParamTree
  task: tasks.Task

  @property
  def quantizers(self) -> tuple[policy.Quantizer, policy.Quantizer]:
    """The learner's and the sampler's."""
    return (
        policy.Quantizer(self.recipe.learner),
        policy.Quantizer(self.recipe.sampler),
    )


def main(cfg: Config, log: run.Log) -> None:
  """Compares and reports.

  Raises:
    SystemExit: something differs; the code is 1.
  """
  log.rewind(0)
  rows = []

  def show(part, text):
    first = len(rows)
    for row in part:
      log({'step': len(rows), **row})
      rows.append(row)
    print(text(rows[first:]), flush=True)

  sides = make_sides(cfg)
  show([policy_row(sides)], _policy_text)
  show(weight_rows(sides), _weight_text)
  sampled = sample(cfg, sides)
  learned, replayed = trace_sides(sides, sampled)
  show(stage_rows(learned, replayed, sampled), _stage_text)
  show(logprob_rows(sides, learned, replayed, sampled), _logprob_text)
  show([verdict(rows)], _verdict_text)
  if rows[-1]['first_difference'] is not None:
    raise SystemExit(_DIFFERENT)


def make_sides(cfg: Config) -> Sides:
  """Returns both sides, quantized from the same masters."""
  recipe = recipes.get(cfg.recipe)
  model, params, task = _load(cfg)
  segments = policy.segments(
      (recipe.learner, recipe.sampler), transformer.param_paths(model)
  )
  masters = transformer.stack(params, segments)
  return Sides(
      model=model,
      recipe=recipe,
      masters=masters,
      learner=_jitted_quantizer(
          policy.Quantizer(recipe.learner), masters, dtype=model.dtype
      ),
      sampler=policy.quantize_params(
          policy.Quantizer(recipe.sampler), masters, dtype=model.dtype
      ),
      task=task,
  )


def sample(cfg: Config, sides: Sides) -> trace.Sampled:
  """Returns the sampler's completions of the first held-out problems."""
  problems = [sides.task.problem('held_out', i) for i in range(cfg.prompts)]
  _, quantizer = sides.quantizers
  return trace.sample(
      sides.model,
      sides.sampler,
      quantizer,
      [problem.prompt for problem in problems],
      jax.random.key(cfg.seed),
      sampler.SampleConfig(cfg.max_new_tokens, sides.task.eos_ids),
  )


def trace_sides(
    sides: Sides, sampled: trace.Sampled
) -> tuple[trace.Trace, trace.Trace]:
  """Returns the traces of the learner and of the sampler's replay."""
  learns, samples = sides.quantizers
  learned = trace.trace_learner(
      sides.model, sides.masters, learns, sides.learner, sampled
  )
  replayed = trace.trace_sampler(sides.model, sides.sampler, samples, sampled)
  return learned, replayed


def policy_row(sides: Sides) -> Row:
  """Returns which weights the two policies treat differently, by design."""
  paths = transformer.param_paths(sides.model)
  learns, samples = (
      policy.resolve(precision_policy, paths)
      for precision_policy in (sides.recipe.learner, sides.recipe.sampler)
  )
  is_one = lambda a, b: a is not None and b is None
  both = lambda a, b: None not in (a, b) and a != b
  pick = lambda rule: [p for p in paths if rule(learns[p], samples[p])]
  return {
      'part': 'policies',
      'recipe': sides.recipe.name,
      'equal': sides.recipe.consistent,
      'in_learner_only': pick(is_one),
      'in_sampler_only': pick(lambda a, b: is_one(b, a)),
      'in_both_differently': pick(both),
  }


def weight_rows(sides: Sides) -> Iterator[Row]:
  """Yields a row for the learner's weights, and one for each layout.

  Each compares with the sampler's tree. A layout that cannot hold the recipe
  has a `reason` in place of numbers. Without quantized weights, all layouts are
  the same.
  """
  leaves = _by_path(sides.sampler)
  own = {path: leaves[path] for path in transformer.param_paths(sides.model)}
  yield _weight_row('learner', _by_path(sides.learner), own)
  is_quantized = any(isinstance(leaf, qtensor.QTensor) for leaf in own.values())
  for layout in layouts.LAYOUTS if is_quantized else layouts.LAYOUTS[:1]:
    target = export.Target(sides.recipe.sampler, layout, sides.recipe.name)
    with tempfile.TemporaryDirectory() as scratch:
      folder = pathlib.Path(scratch) / layout
      try:
        export.export(sides.model, sides.sampler, folder, target)
      except ValueError as error:
        yield {'part': 'weights', 'of': layout, 'reason': str(error)}
        continue
      config, reloaded = hf.load(folder, dtype=sides.model.dtype)
      row = _weight_row(layout, _by_path(reloaded), own)
    # No config.json says in which blocks attention is summed.
    block = sides.model.attention_block
    if dataclasses.replace(config, attention_block=block) != sides.model:
      row['first'] = 'config.json: the model has another configuration'
    yield row


def stage_rows(
    learned: trace.Trace, replayed: trace.Trace, sampled: trace.Sampled
) -> Iterator[Row]:
  """Yields a row for every stage, in the order of computation."""
  for found in trace.differences(learned, replayed, sampled):
    row = dataclasses.asdict(found)
    head, _, rest = row.pop('stage').partition('.')
    layer, name = None, head
    if head == 'layers':
      layer, _, name = rest.partition('.')
    position, index = row.pop('first') or (None, None)
    yield {
        'part': 'stages',
        'layer': None if layer is None else int(layer),
        'name': name,
        **row,
        'first_position': position,
        'first_row': index,
    }


def logprob_rows(
    sides: Sides,
    learned: trace.Trace,
    replayed: trace.Trace,
    sampled: trace.Sampled,
) -> Iterator[Row]:
  """Yields a row for each pair of programs that should agree.

  `k3` is the estimate of KL(second || first), from tokens of the sampler.
  """
  learns, samples = sides.quantizers
  untraced = learner.logprobs(
      sides.model,
      sides.masters,
      learns,
      sides.learner,
      sampled.tokens,
      sampled.temperature,
  )
  untraced = sampled.of_completions(untraced)
  again = trace.replay(sides.model, sides.sampler, samples, sampled)
  for first, second, a, b in (
      ('learner', 'generate', untraced, sampled.logprobs),
      ('traced learner', 'learner', learned.logprobs, untraced),
      ('replay', 'generate', again, sampled.logprobs),
      ('traced replay', 'generate', replayed.logprobs, sampled.logprobs),
  ):
    equal = a.view(np.uint32) == b.view(np.uint32)
    arrays = [jnp.asarray(x) for x in (a, b, sampled.mask)]
    yield {
        'part': 'logprobs',
        'first': first,
        'second': second,
        'tokens': int(sampled.mask.sum()),
        'equal': int(equal[sampled.mask].sum()),
        'mean_gap': float(diagnostics.logprob_gap(*arrays)),
        'max_gap': float(np.abs(a - b)[sampled.mask].max()),
        'k3': float(diagnostics.kl_k3(*arrays)),
    }


def verdict(rows: Sequence[Row]) -> Row:
  """Returns the first difference of all, and that of each part, or None."""
  found = [(row['part'], _difference(row)) for row in rows]
  found = [(part, text) for part, text in found if text is not None]
  of = lambda part: next((t for p, t in found if p == part), None)
  return {
      'part': 'verdict',
      'first_difference': found[0][1] if found else None,
      'weights': of('weights'),
      'stages': of('stages'),
      'logprobs': of('logprobs'),
  }


def _load(cfg):
  """Returns the model, its per-layer masters, and a task of tokens."""
  if cfg.checkpoint is not None:
    model, params = hf.load(cfg.checkpoint)
    task = text_tasks.TokenTask(
        cfg.task.make_text(),
        tokenizer.load(cfg.checkpoint),
        model.vocab_size,
        cfg.max_new_tokens,
    )
    return model, policy.dequantize_params(params), task
  if cfg.warm_start is not None:
    saved = files.read_json(cfg.warm_start, 'config.json')
    warm = config_json.from_json(sft.Config, saved)
    warm = dataclasses.replace(warm, workdir=cfg.warm_start)
    params = jax.tree.map(np.asarray, sft.load(warm))
    return warm.model, params, warm.task.make()
  params = transformer.init_params(jax.random.key(cfg.seed), cfg.model)
  return cfg.model, params, cfg.task.make()


def _by_path(params):
  """Returns every parameter of a tree, stacked or not, on the host."""
  params = jax.device_get(params)
  if isinstance(params['layers'], tuple):
    params = transformer.unstack(params)
  leaves = {path: leaf for path, leaf in params.items() if path != 'layers'}
  for i, layer in enumerate(params['layers']):
    leaves |= {f'layers.{i}.{name}': leaf for name, leaf in layer.items()}
  return leaves


def _weight_row(of, params, own):
  """Returns how the weights of a tree differ from the sampler's `own`."""
  quantized = one_sided = compared = different = differing = 0
  first = None
  for path, leaf in own.items():
    arrays, others = _arrays(leaf), _arrays(params[path])
    if arrays.keys() != others.keys():
      one_sided += 1
      first = first or f'{path}: quantized on one side only'
      continue
    quantized += isinstance(leaf, qtensor.QTensor)
    bad = {
        name: _different_bytes(others[name], x) for name, x in arrays.items()
    }
    compared += sum(x.nbytes for x in arrays.values())
    different += sum(bad.values())
    if any(bad.values()):
      differing += 1
      name = next(name for name, count in bad.items() if count)
      first = first or f'{path}: {name}'
  return {
      'part': 'weights',
      'of': of,
      'weights': len(own) - one_sided,
      'quantized': quantized,
      'on_one_side': one_sided,
      'bytes': compared,
      'weights_differ': differing,
      'bytes_differ': different,
      'first': first,
  }


def _arrays(leaf):
  """Returns the arrays that a weight consists of, by name."""
  if not isinstance(leaf, qtensor.QTensor):
    return {'values': np.asarray(leaf)}
  arrays = {
      'codes': leaf.data,
      'block scales': leaf.block_scale,
      'global scale': leaf.global_scale,
  }
  return {name: x for name, x in arrays.items() if x is not None}


def _different_bytes(x, y):
  if x.shape != y.shape or x.dtype != y.dtype:
    return max(x.nbytes, y.nbytes)
  x, y = (np.frombuffer(t.tobytes(), np.uint8) for t in (x, y))
  return int(np.sum(x != y))


def _difference(row):
  """Returns what differs in a row, as text, or None."""
  if row['part'] == 'weights' and row.get('first') is not None:
    return f'weights of {row["of"]} and sampler, {row["first"]}'
  if row['part'] == 'stages' and row['differ']:
    where = '' if row['layer'] is None else f'layer {row["layer"]}, '
    return (
        f'{where}{row["name"]}, token position {row["first_position"]}, row'
        f' {row["first_row"]}'
    )
  if row['part'] == 'logprobs' and row['equal'] < row['tokens']:
    return (
        f'log-probs of {row["first"]} and {row["second"]}, {row["equal"]} of'
        f' {row["tokens"]} equal'
    )
  return None


def _policy_text(rows):
  (row,) = rows
  if row['equal']:
    return f'Recipe {row["recipe"]}: learner and sampler have one policy.\n'
  text = f'Recipe {row["recipe"]}: two policies, by design.\n'
  for key in ('in_learner_only', 'in_sampler_only', 'in_both_differently'):
    if row[key]:
      text += f'Quantized {key.replace("_", " ")}, {len(row[key])} weights:\n'
      text += ''.join(f'  {line}\n' for line in _ranges(row[key]))
  return text


def _ranges(paths):
  """Yields the paths, those of neighbouring layers as one."""
  layers = collections.defaultdict(list)
  for path in paths:
    head, _, rest = path.partition('.')
    if head != 'layers':
      yield path
      continue
    layer, _, name = rest.partition('.')
    layers[name].append(int(layer))
  for name, numbers in layers.items():
    # In a run of neighbours, number - index is constant.
    for _, run_of in itertools.groupby(
        enumerate(numbers), lambda item: item[1] - item[0]
    ):
      run_of = [number for _, number in run_of]
      last = f'-{run_of[-1]}' if len(run_of) > 1 else ''
      yield f'layers.{run_of[0]}{last}.{name}'


def _weight_text(rows):
  table: _Table = [
      ('with sampler', 'weights', 'quantized', 'bytes', 'differ', 'one side')
  ]
  notes = ''
  for row in rows:
    if 'reason' in row:
      notes += f'{row["of"]}: {row["reason"]}\n'
      continue
    keys = ('weights', 'quantized', 'bytes', 'bytes_differ', 'on_one_side')
    table.append((row['of'], *(f'{row[key]:,}' for key in keys)))
    if row['first'] is not None:
      notes += f'{row["of"]}: first difference {row["first"]}\n'
  return run.aligned(table) + notes


def _stage_text(rows):
  """Returns a line for each stage, its layers together."""
  table: _Table = [
      ('stage', 'layers differ', 'positions differ', 'in prompts', 'largest')
  ]
  for name in dict.fromkeys(row['name'] for row in rows):
    own = [row for row in rows if row['name'] == name]
    total = lambda key, own=own: sum(row[key] for row in own)
    table.append(
        (
            name,
            f'{sum(row["differ"] > 0 for row in own)} of {len(own)}',
            f'{total("differ"):,} of {total("positions"):,}',
            f'{total("differ_in_prompts"):,}',
            f'{max(row["max_abs"] for row in own):.3g}',
        )
    )
  first = next(filter(None, map(_difference, rows)), 'nowhere')
  return f'{run.aligned(table)}Learner and sampler part: {first}\n'


def _logprob_text(rows):
  table: _Table = [
      ('log-probs', 'tokens', 'equal', 'mean gap', 'max gap', 'k3')
  ]
  for row in rows:
    gaps = (f'{row[key]:.3g}' for key in ('mean_gap', 'max_gap', 'k3'))
    counts = f'{row["tokens"]:,}', f'{row["equal"] / row["tokens"]:.2%}'
    table.append((f'{row["first"]}, {row["second"]}', *counts, *gaps))
  return run.aligned(table)


def _verdict_text(rows):
  return f'First difference: {rows[0]["first_difference"] or "none"}'


if __name__ == '__main__':
  run.launch(main, PRESETS)
