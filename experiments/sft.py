"""A supervised warm start, in plain bfloat16, for the arithmetic tasks.

    python -m experiments.sft smoke
    python -m experiments.sft demo --workdir=runs/sft

The teacher holds some wrong facts (tasks/arithmetic.py), so that what comes out
has something to unlearn. Writes a checkpoint that experiments.grpo starts from.
"""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import run
from nvfp4_jax import checkpoint
from nvfp4_jax import policy
from nvfp4_jax import tasks
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import types


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/sft')
  task: tasks.TaskConfig = tasks.TaskConfig()
  model: model_config.ModelConfig = model_config.tiny(16)
  optimizer: learner.OptimizerConfig = learner.OptimizerConfig(
      learning_rate=2e-3
  )
  steps: int = 600
  batch: int = 128
  wrong_probability: float = 0.65  # how often a wrong fact is used
  seed: int = 0  # of the initialization and of the data
  save_interval: int = 200


SHORT = Config(steps=4, batch=8, save_interval=2)  # for smoke presets
PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        dataclasses.replace(
            SHORT,
            workdir=pathlib.Path('runs/sft_smoke'),
            task=tasks.TaskConfig(digits=3),
            model=dataclasses.replace(model_config.tiny(16), num_layers=2),
        ),
    ),
    'demo': ('The warm start of the demo.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Trains, or goes on from the last checkpoint."""
  task = cfg.task.make()
  state, start = _initial(cfg)
  log.rewind(start)
  progress = run.Progress('warm start', cfg.steps, start)
  for step in range(start, cfg.steps):
    tokens, mask = batch(cfg, task, step)
    tokens, mask = jnp.asarray(tokens), jnp.asarray(mask)
    state, metrics = learner.supervised_step(
        cfg.model, cfg.optimizer, state, tokens, mask
    )
    loss, grad_norm = float(metrics['loss']), float(metrics['grad_norm'])
    log({'step': step, 'loss': loss, 'grad_norm': grad_norm})
    progress(step + 1, f'loss {loss:.3f}')
    if (step + 1) % cfg.save_interval == 0 or step + 1 == cfg.steps:
      _save(cfg, state, step + 1)


def check_part(cfg: Config, *others: str) -> None:
  """Checks what stands in another experiment's configuration.

  That experiment decides where the warm start goes, and its task, model and
  seed.

  Args:
    cfg: the part.
    *others: further fields that the experiment has no use for.

  Raises:
    ValueError: one of these fields is set.
  """
  default = Config()
  for name in ('workdir', 'task', 'model', 'seed', *others):
    if getattr(cfg, name) != getattr(default, name):
      raise ValueError(
          f'supervised.{name} {getattr(cfg, name)!r} is not used here: the'
          ' experiment decides it.'
      )


def load(cfg: Config) -> policy.ParamTree:
  """Returns the per-layer masters of a finished warm start.

  Raises:
    FileNotFoundError: it is not there, or not finished.
  """
  if checkpoint.latest_step(_checkpoints(cfg)) != cfg.steps:
    raise FileNotFoundError(f'No finished warm start in {cfg.workdir}.')
  return transformer.unstack(_initial(cfg)[0].params)


def batch(cfg: Config, task: Any, step: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns tokens `[B, T]` int32 and the mask of answer tokens, bool.

  Args:
    cfg: the run; of the batch, the probability of wrong facts, and the seed.
    task: makes problems and misinformed answers, as `Arithmetic` does.
    step: which batch; all have one length T.
  """
  rng = np.random.default_rng([cfg.seed, step])
  rows, starts = [], []
  for i in range(cfg.batch):
    problem = task.problem('train', step * cfg.batch + i)
    answer = task.misinformed_answer(problem, rng, cfg.wrong_probability)
    rows.append((*problem.prompt, *answer))
    starts.append(len(problem.prompt))
  length = max(len(row) for row in rows)
  tokens = np.array([(*row, *[0] * (length - len(row))) for row in rows])
  ends = np.array([len(row) for row in rows])
  at = np.arange(length)
  mask = (at >= np.array(starts)[:, None]) & (at < ends[:, None])
  return tokens.astype(np.int32), mask


def _initial(cfg) -> tuple[types.TrainState, int]:
  params = transformer.init_params(jax.random.key(cfg.seed), cfg.model)
  stacked = transformer.stack(params, (cfg.model.num_layers,))
  state = learner.init_state(stacked, cfg.optimizer)
  if checkpoint.latest_step(_checkpoints(cfg)) is None:
    return state, 0
  arrays, record = checkpoint.restore(
      _checkpoints(cfg), transformer.map_params(transformer.unstack, state)
  )
  restack = lambda tree: transformer.stack(tree, (cfg.model.num_layers,))
  return transformer.map_params(restack, arrays), record['step']


def _save(cfg, state, step):
  arrays = transformer.map_params(transformer.unstack, state)
  checkpoint.save(_checkpoints(cfg), step, arrays, {'step': step})


def _checkpoints(cfg):
  return cfg.workdir / 'checkpoints'


if __name__ == '__main__':
  run.launch(main, PRESETS)
