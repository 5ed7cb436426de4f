"""GRPO under one recipe, and beside it under others from the same start.

    python -m experiments.grpo smoke
    python -m experiments.grpo demo                # make demo; minutes on CPU
    python -m experiments.grpo nvfp4_final --seed=1
    python -m experiments.grpo smollm2 --task.digits=1 --recipe=bf16
    python -m experiments.grpo resume runs/demo

The start is a warm start (experiments.sft) that has learned wrong facts, which
reinforcement corrects, or a Hugging Face folder (`--checkpoint`) with a task of
text. A run writes metrics.jsonl, checkpoints and figures/ to its workdir;
recipes in `compare` do so in a subfolder each. diagnostics.jsonl holds a row
for every quantized weight every `diagnostics_interval` steps.

SIGTERM ends a run with a checkpoint and exit code 0. Steps whose gradient is
not finite are skipped; after `max_skipped` in a row the run ends with a
checkpoint and exit code 3.
"""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import numpy as np

from experiments import plots
from experiments import run
from experiments import sft
from nvfp4_jax import checkpoint
from nvfp4_jax import config
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import recipes
from nvfp4_jax import tasks
from nvfp4_jax import tokenizer
from nvfp4_jax import variants
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import evaluation
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import loop
from nvfp4_jax.rl import rollouts
from nvfp4_jax.rl import text_tasks
from nvfp4_jax.tasks import rewards

_NOT_FINITE = 3  # exit code
_GRADIENTS = 2**31  # beyond every step; `rollouts.step_key` has the others
# Mean exp|log-prob gap| above which NeMo-RL's guide takes a run for broken.
_HEALTHY_MISMATCH = 1.05


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/grpo')
  recipe: str = 'nvfp4_final'
  sampler_recipe: str | None = None  # another recipe, whose sampler is taken
  variant: variants.Variant = variants.Variant()  # changes to the recipe
  compare: tuple[str, ...] = ()  # recipes to run too, for the same steps
  checkpoint: pathlib.Path | None = None  # a Hugging Face folder to start from
  warm_start: pathlib.Path | None = None  # default: WORKDIR/warm_start
  supervised: sft.Config = sft.Config(steps=200, save_interval=100)
  model: model_config.ModelConfig = model_config.tiny(16)  # of the warm start
  task: tasks.TaskConfig = tasks.TaskConfig()
  max_answer_tokens: int = 64  # of a task of text; others know their own
  optimizer: learner.OptimizerConfig = learner.OptimizerConfig(
      learning_rate=1e-3
  )
  grpo: learner.GRPOConfig = learner.GRPOConfig()
  rollout: rollouts.RolloutConfig = rollouts.RolloutConfig(
      prompts_per_step=16, group_size=8
  )
  memory: learner.MemoryConfig = learner.MemoryConfig()
  updates_per_rollout: int = 1
  steps: int = 40  # rollouts
  held_out: evaluation.EvalConfig = evaluation.EvalConfig()
  eval_interval: int = 10  # held-out accuracy every so many steps
  save_interval: int = 20  # 0: no checkpoints, and no way to resume
  diagnostics_interval: int = 10  # of diagnostics.jsonl, in steps; 0 for none
  max_skipped: int = 5  # steps in a row whose gradient is not finite
  reward_workers: int = 0  # processes that reward; 0: in this process
  reward_timeout: float = 10.0  # seconds for one reward, in those processes
  tensorboard: bool = False  # beside metrics.jsonl; extra `tensorboard`
  wandb: str = ''  # project of Weights & Biases; needs its package
  seed: int = 0  # of warm start and sampling

  def __post_init__(self):
    for name in (self.recipe, *self.compare):
      make_recipe(name, self.sampler_recipe, self.variant)
    if self.checkpoint is not None and self.warm_start is not None:
      raise ValueError('Give checkpoint or warm_start, not both.')
    if (self.checkpoint is None) == self.task.is_text:
      raise ValueError(
          f'Task {self.task.name!r} and checkpoint {self.checkpoint}: tasks of'
          ' text start from a checkpoint, and only they.'
      )
    for name in ('max_skipped', 'eval_interval'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} {getattr(self, name)} is below 1.')
    sft.check_part(self.supervised)
    if self.checkpoint is None:
      self._check_unused(f'task {self.task.name!r}', 'max_answer_tokens')
    else:
      self._check_unused('a run from a checkpoint', 'model', 'supervised')
    if not self.reward_workers:
      self._check_unused('reward_workers 0', 'reward_timeout')

  def _check_unused(self, by, *names):
    for name in names:
      if (value := getattr(self, name)) != _DEFAULTS[name]:
        raise ValueError(f'{name} {value!r} is not used by {by}.')


_DEFAULTS = {f.name: f.default for f in dataclasses.fields(Config)}


def make_recipe(
    name: str, sampler: str | None, variant: variants.Variant
) -> recipes.Recipe:
  """Returns a recipe, with the sampler of another one and with changes."""
  recipe = recipes.get(name) if sampler is None else recipes.pair(name, sampler)
  return recipes.vary(recipe, variant)


def _preset(name, text, **changes):
  workdir = pathlib.Path('runs') / name
  return {
      name: (text, dataclasses.replace(Config(), workdir=workdir, **changes))
  }


PRESETS = {
    **_preset(
        'smoke',
        'Seconds on a CPU; run by the tests.',
        supervised=sft.SHORT,
        model=dataclasses.replace(
            model_config.tiny(16), num_layers=2, attention_block=32
        ),
        task=tasks.TaskConfig(digits=3),
        steps=4,
        rollout=rollouts.RolloutConfig(prompts_per_step=4, group_size=4),
        eval_interval=2,
        held_out=evaluation.EvalConfig(problems=16),
        save_interval=2,
    ),
    **_preset(
        'demo',
        'What `make demo` runs: nvfp4_final, then bf16 and nvfp4_naive.',
        compare=('bf16', 'nvfp4_naive'),
    ),
    **_preset(
        'smollm2',
        'SmolLM2-135M-Instruct adds numbers in chats; minutes on a GPU.',
        checkpoint=pathlib.Path('models/smollm2'),
        task=tasks.TaskConfig('chat_addition', digits=1),
        max_answer_tokens=48,
        optimizer=learner.OptimizerConfig(learning_rate=1e-5),
        steps=100,
        held_out=evaluation.EvalConfig(problems=128),
    ),
}
for _name, _recipe in recipes.RECIPES.items():
  PRESETS |= _preset(_name, f'The demo under {_name} alone.', recipe=_name)


def main(cfg: Config, log: run.Log) -> None:
  """Starts, then GRPO under each recipe; finished parts are skipped."""
  start = load_start(cfg)
  train(cfg, start, log)
  for name in cfg.compare:
    other = dataclasses.replace(
        cfg, workdir=cfg.workdir / name, recipe=name, compare=()
    )
    run.save_config(other.workdir, other)
    train(other, start, run.Log(other.workdir))
  runs = {name: [cfg.workdir / name] for name in cfg.compare}
  path = plots.grpo(
      {cfg.recipe: [cfg.workdir], **runs}, cfg.workdir / 'figures'
  )
  print(f'Figure: {path}', file=sys.stderr)


@dataclasses.dataclass(frozen=True)
class Start:
  """What a run starts from.

  Attributes:
    model: the model.
    params: its per-layer masters, on the host.
    task: makes problems and rewards.
    fingerprint: of the task's data file, if it has one.
  """

  model: model_config.ModelConfig
  params: policy.ParamTree
  task: tasks.Task
  fingerprint: str | None


def train(cfg: Config, start: Start, log: run.Log) -> None:
  """Runs GRPO under one recipe, from the last checkpoint if there is one."""
  recipe = make_recipe(cfg.recipe, cfg.sampler_recipe, cfg.variant)
  paths = transformer.param_paths(start.model)
  recipes.check(recipe, paths)
  _report_pair(cfg, recipe, paths)
  quantizers = make_quantizers(recipe, cfg.seed)
  segments = policy.segments((recipe.learner, recipe.sampler), paths)
  stack = lambda tree: transformer.stack(tree, segments)
  state = learner.init_state(stack(start.params), cfg.optimizer)
  references = make_references(quantizers, state.params)
  fixed = {
      'policy': config.to_json(recipe),
      'task': _problems(cfg.task),
      'data': start.fingerprint,
  }
  folder = cfg.workdir / 'checkpoints'
  position = {'step': 0, 'cursor': 0, 'skipped': 0}
  if checkpoint.latest_step(folder) is not None:
    like = transformer.map_params(transformer.unstack, state)
    arrays, record = checkpoint.restore(folder, like, policy=fixed['policy'])
    # On the host first: orbax commits arrays to a device, and for those every
    # program would be compiled again.
    state = transformer.map_params(stack, jax.tree.map(np.asarray, arrays))
    position = _resumed(record, fixed, folder)
  first = position['step']
  log.rewind(first)
  weight_log = _WeightLog(cfg)
  weight_log.rows.rewind(first)
  mismatch_warning = _MismatchWarning()

  settings = _loop_config(cfg, start.model, recipe)
  synced = loop.sync(quantizers, state.params)
  progress = run.Progress(cfg.recipe, cfg.steps, first)
  with (
      _scorer(cfg, start.task) as score,
      run.trackers(cfg, first) as track,
      run.StopRequest() as stop,
  ):
    for step in range(first, cfg.steps):
      evaluate = lambda tree: evaluation.evaluate(
          start.model,
          cfg.rollout,
          cfg.held_out,
          start.task,
          quantizers.sampler,
          tree,
          seed=cfg.seed,
          score=score,
      )
      scores = {}
      if step % cfg.eval_interval == 0:
        scores = evaluate(synced.sampler)
      state, synced, cursor, row = loop.train_rollout(
          settings,
          start.task,
          quantizers,
          references,
          state,
          synced,
          position['cursor'],
          step,
          score=score,
      )
      position = _advance(position, step, cursor, row)
      done = position['step']
      if done == cfg.steps:  # the last row is scored after its update
        scores = evaluate(synced.sampler)
      log(row | scores)
      track(row | scores)
      mismatch_warning(row)
      if cfg.diagnostics_interval and step % cfg.diagnostics_interval == 0:
        weight_log(step, loop.weight_stats(state.params, synced.sampler))
      progress(
          done,
          f'reward {row["reward"]:.2f}'
          f'  mismatch {row["mismatch_abs_logprob"]:.4f}',
      )
      broken = position['skipped'] >= cfg.max_skipped
      last = done == cfg.steps or stop.requested or broken
      if cfg.save_interval and (done % cfg.save_interval == 0 or last):
        arrays = transformer.map_params(transformer.unstack, state)
        checkpoint.save(folder, done, arrays, position | fixed)
      if broken:
        print(
            f'The gradients of {position["skipped"]} steps in a row were not'
            f' finite. Stopped behind step {step}, with a checkpoint.',
            file=sys.stderr,
        )
        raise SystemExit(_NOT_FINITE)
      if stop.requested:
        print(
            f'Stopped behind step {step}, with a checkpoint.', file=sys.stderr
        )
        raise SystemExit(0)


def _problems(task):
  """Returns what decides a task's problems and their order, but for a file."""
  names = ('name', 'digits', 'seed', 'dataset', 'system_prompt')
  return {name: getattr(task, name) for name in names}


def _resumed(record, fixed, folder):
  """Returns where a run goes on; what must not change has not changed."""
  if (task := record.get('task')) != fixed['task']:
    raise checkpoint.DataMismatchError(
        f'The checkpoint in {folder} was made with the task {task} and would go'
        f' on with {fixed["task"]}: other problems, or another order.'
    )
  if record.get('data') != fixed['data']:
    raise checkpoint.DataMismatchError(
        f'The checkpoint in {folder} was made with the data file of SHA-256'
        f' {record.get("data")}; it is now {fixed["data"]}.'
    )
  return {name: record[name] for name in ('step', 'cursor', 'skipped')}


def _advance(position, step, cursor, row):
  skipped = position['skipped'] + 1 if row['skipped'] else 0
  return {'step': step + 1, 'cursor': cursor, 'skipped': skipped}


class _MismatchWarning:
  """Warns once, when the mismatch leaves the healthy range."""

  def __init__(self):
    self._warned = False

  def __call__(self, row: Mapping[str, Any]) -> None:
    value = row['token_mult_prob_error']
    if value > _HEALTHY_MISMATCH and not self._warned:
      self._warned = True
      print(
          f'Warning: mean exp|log-prob gap| is {value:.3f} in step'
          f' {row["step"]}, above {_HEALTHY_MISMATCH}: sampler and learner are'
          ' not one policy.',
          file=sys.stderr,
      )


class _WeightLog:
  """Rows of quantization statistics; warns once of each underflowing weight."""

  def __init__(self, cfg: Config):
    self.rows = run.Log(cfg.workdir, 'diagnostics.jsonl')
    self._warned: set[str] = set()

  def __call__(self, step: int, stats: Mapping[str, loop.Row]) -> None:
    for name, values in stats.items():
      self.rows({'step': step, 'name': name, **values})
      if values['underflow_blocks'] and name not in self._warned:
        self._warned.add(name)
        count, elements = (
            int(values[f'underflow_{what}']) for what in ('blocks', 'elements')
        )
        print(
            f'Warning: {name}: the scales of {count} blocks underflow, so that'
            f' {elements} elements are zero (step {step}).',
            file=sys.stderr,
        )


def make_quantizers(recipe: recipes.Recipe, seed: int) -> loop.Quantizers:
  """Returns the quantizers of both sides; the learner's may need a key."""
  key = None
  if policy.is_stochastic(recipe.learner):
    key = jax.random.fold_in(jax.random.key(seed), _GRADIENTS)
  return loop.Quantizers(
      policy.Quantizer(recipe.learner, key), policy.Quantizer(recipe.sampler)
  )


def make_references(
    quantizers: loop.Quantizers, params: policy.ParamTree
) -> dict[str, policy.ParamTree]:
  """Returns the reference policy, in bfloat16 and as the learner runs it."""
  bf16 = policy.Quantizer(policy.BF16)
  references = {'bf16': policy.quantize_params(bf16, params)}
  if quantizers.learner.policy != bf16.policy:
    references['quantized'] = policy.quantize_params(quantizers.learner, params)
  return references


def _report_pair(cfg, recipe, paths):
  """Writes WORKDIR/recipe.json; says where a pair is not one policy."""
  unequal = recipes.differences(recipe, paths)
  record = config.to_json(recipe) | {'differences': unequal}
  text = json.dumps(record, indent=2) + '\n'
  files.write_atomically(cfg.workdir / 'recipe.json', text.encode())
  if unequal:
    path, what = next(iter(unequal.items()))
    print(
        f'{recipe.name}: learner and sampler are unequal in {len(unequal)} of'
        f' {len(paths)} places; {path}: {what}.',
        file=sys.stderr,
    )


def _loop_config(cfg, model, recipe):
  return loop.LoopConfig(
      model=model,
      rollout=cfg.rollout,
      optimizer=cfg.optimizer,
      grpo=recipes.objective(recipe, cfg.grpo),
      memory=cfg.memory,
      updates_per_rollout=cfg.updates_per_rollout,
      seed=cfg.seed,
  )


@contextlib.contextmanager
def _scorer(cfg, task) -> Iterator[rollouts.Score | None]:
  """Yields what rewards completions; None for this process."""
  if not cfg.reward_workers:
    yield None
    return
  with rewards.Pool(
      task.reward, workers=cfg.reward_workers, timeout=cfg.reward_timeout
  ) as pool:
    yield pool.score


def load_start(cfg: Config) -> Start:
  """Returns what a run starts from; a warm start is made if it is missing."""
  if cfg.checkpoint is None:
    return Start(cfg.model, _warm_start(cfg), cfg.task.make(), None)
  model, params = hf.load(cfg.checkpoint)
  text = cfg.task.make_text()
  task = text_tasks.TokenTask(
      text,
      tokenizer.load(cfg.checkpoint),
      model.vocab_size,
      cfg.max_answer_tokens,
  )
  masters = jax.tree.map(np.asarray, policy.dequantize_params(params))
  return Start(model, masters, task, text.fingerprint)


def _warm_start(cfg):
  """Returns the masters of the warm start, which is made if it is missing."""
  warm = dataclasses.replace(
      cfg.supervised,
      workdir=cfg.warm_start or cfg.workdir / 'warm_start',
      task=cfg.task,
      model=cfg.model,
      seed=cfg.seed,
  )
  if cfg.warm_start is None:
    run.save_config(warm.workdir, warm)
    sft.main(warm, run.Log(warm.workdir))
  return jax.tree.map(np.asarray, sft.load(warm))


if __name__ == '__main__':
  run.launch(main, PRESETS)
