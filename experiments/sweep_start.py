"""Where the runs of a sweep start: warm starts, and outlier channels."""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import run
from experiments import sft
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner
from nvfp4_jax.rl import types

_STEPS = 10  # of a program's call
_OUTLIERS = (3, 40, 77)  # channels, modulo the width
# What a norm's output is multiplied with.
_READERS = {
    'input_layernorm': ('self_attn.q_proj', 'self_attn.k_proj')
    + ('self_attn.v_proj',),
    'post_attention_layernorm': ('mlp.gate', 'mlp.experts.gate_proj')
    + ('mlp.experts.up_proj',),
}


def warm_starts(
    cfg: sft.Config, count: int, folder: pathlib.Path
) -> list[policy.ParamTree]:
  """Returns the per-layer masters of warm starts, on the host.

  They are trained unless the folder has them: as `experiments.sft` does with
  seeds 0, 1, ..., from the same initializations and batches, but as lanes of
  one program, which may add in another order.

  Args:
    cfg: all but the seed.
    count: how many.
    folder: holds a file for each of them, or will.
  """
  paths = [folder / f'{i}.npz' for i in range(count)]
  initial = lambda key: learner.init_state(
      transformer.stack(
          transformer.init_params(key, cfg.model), (cfg.model.num_layers,)
      ),
      cfg.optimizer,
  )
  if not all(path.exists() for path in paths):
    params = _train(
        [dataclasses.replace(cfg, seed=i) for i in range(count)], initial
    )
    folder.mkdir(parents=True, exist_ok=True)
    for i, path in enumerate(paths):
      save(path, flatten(jax.tree.map(lambda leaf, i=i: leaf[i], params)))
  like = jax.eval_shape(initial, jax.random.key(0)).params
  return [
      transformer.unstack(unflatten(like, dict(np.load(path))))
      for path in paths
  ]


def with_outliers(params: policy.ParamTree, factor: float) -> policy.ParamTree:
  """Returns per-layer masters of the same function, with outlier channels.

  A few channels of the gains before attention and MLP are multiplied by the
  factor, and the columns of the weights that read them divided by it. Bits of
  the function differ by rounding, unless the factor is a power of two.
  """
  layers = []
  for layer in params['layers']:
    layer = dict(layer)
    for gain, readers in _READERS.items():
      scale = np.ones(layer[gain].shape[-1], np.float32)
      scale[np.array(_OUTLIERS) % scale.size] = factor
      layer[gain] = np.asarray(layer[gain]) * scale
      for name in readers:
        layer[name] = np.asarray(layer[name]) / scale
    layers.append(layer)
  return {**params, 'layers': layers}


def save(path: pathlib.Path, arrays: Mapping[str, Any]) -> None:
  """Writes arrays to an npz file, whole or not at all."""
  with files.open_atomically(path) as file:
    np.savez(file, **arrays)


def flatten(tree: Any) -> dict[str, np.ndarray]:
  """Returns the leaves of a tree by their place in it."""
  return {
      jax.tree_util.keystr(path): np.asarray(leaf)
      for path, leaf in jax.tree.leaves_with_path(tree)
  }


def unflatten(like: Any, arrays: Mapping[str, np.ndarray]) -> Any:
  """Returns a tree of the structure of `like`, of what `flatten` made."""
  return jax.tree.map_with_path(
      lambda path, leaf: arrays[jax.tree_util.keystr(path)].reshape(leaf.shape),
      like,
  )


class _Remembered:
  """A task whose latest problems are made once for all warm starts."""

  def __init__(self, task: Any):
    self.problem = functools.lru_cache(maxsize=4096)(task.problem)
    self.misinformed_answer = task.misinformed_answer


def _train(cfgs: Sequence[sft.Config], initial):
  """Returns the stacked masters of all warm starts, `[W]` in front."""
  one = cfgs[0]
  task = _Remembered(one.task.make())
  seeds = [jax.random.key(cfg.seed) for cfg in cfgs]
  states = jax.vmap(initial)(jnp.stack(seeds))
  progress = run.Progress('warm starts', one.steps)
  for first in range(0, one.steps, _STEPS):
    steps = range(first, min(first + _STEPS, one.steps))
    batches = [[sft.batch(cfg, task, step) for step in steps] for cfg in cfgs]
    tokens, mask = (
        np.stack([[pair[i] for pair in lane] for lane in batches])
        for i in range(2)
    )
    states, loss = _supervise(one.model, one.optimizer, states, tokens, mask)
    progress(steps[-1] + 1, f'loss {float(loss[:, -1].mean()):.3f}')
  return jax.tree.map(np.asarray, states.params)


@functools.partial(jax.jit, static_argnames='model', donate_argnames='states')
def _supervise(
    model: model_config.ModelConfig,
    optimizer: learner.OptimizerConfig,
    states: types.TrainState,
    tokens: jax.Array,
    mask: jax.Array,
) -> tuple[types.TrainState, jax.Array]:
  """Returns warm starts after some supervised updates, and their losses.

  Args:
    model: the model; static.
    optimizer: shared by all.
    states: `[W]` in front of every leaf.
    tokens: `[W, steps, B, T]` int32.
    mask: `[W, steps, B, T]` bool, the tokens to learn.

  Returns:
    The states and float32 `[W, steps]`.
  """

  def body(state, batch):
    state, metrics = learner.supervised_step(model, optimizer, state, *batch)
    return state, metrics['loss']

  run = lambda state, *batches: lax.scan(body, state, batches)
  return jax.vmap(run)(states, tokens, mask)
