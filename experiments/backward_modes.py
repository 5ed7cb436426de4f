"""Gradient error and memory of a quantized linear layer under backward modes.

    python -m experiments.backward_modes smoke
    python -m experiments.backward_modes figure     # 1 minute on two cores

For each mode, one row per seed: the relative error of the output, of dgrad and
of wgrad against the float32 layer, the same gradients against those of the
function that the forward pass really computed (dequantized operands), and the
bytes that the forward pass keeps for the backward pass.
colab/02_backward_modes.ipynb draws the figure.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp

from experiments import plots
from experiments import run
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_Spec = quantization.QuantSpec
_TOKEN, _NVFP4, _MXFP8 = _Spec('nvfp4', 'token'), _Spec('nvfp4'), _Spec('mxfp8')

MODES = {
    'bf16': None,
    'nvfp4 high_precision': matmul.MatmulPrecision(
        _TOKEN, _NVFP4, backward='high_precision'
    ),
    'nvfp4 dequantized': matmul.MatmulPrecision(_TOKEN, _NVFP4),
    'nvfp4 quantized': matmul.MatmulPrecision(
        lhs=_Spec('nvfp4', hadamard=True),
        rhs=_Spec('nvfp4', block_2d=True),
        grad=_Spec('nvfp4', rounding='stochastic', hadamard=True),
        backward='quantized',
    ),
    'mxfp8 high_precision': matmul.MatmulPrecision(
        _MXFP8, _MXFP8, backward='high_precision'
    ),
    'mxfp8 dequantized': matmul.MatmulPrecision(_MXFP8, _MXFP8),
    'mxfp8 quantized': matmul.MatmulPrecision(
        _MXFP8, _MXFP8, _MXFP8, 'quantized'
    ),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/backward_modes')
  tokens: int = 512  # a multiple of 32
  features: int = 1024  # in and out; a multiple of 32
  seeds: int = 3
  modes: tuple[str, ...] = tuple(MODES)  # names in MODES

  def __post_init__(self):
    for name in self.modes:
      if name not in MODES:
        raise ValueError(f'mode {name!r} is not one of {sorted(MODES)}.')


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/backward_modes_smoke'),
            tokens=32,
            features=64,
            seeds=1,
            modes=('bf16', 'nvfp4 quantized'),
        ),
    ),
    'figure': ('The figure in the README.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row per mode and seed, and draws the figure."""
  log.rewind(0)
  step = 0
  for name in cfg.modes:
    precision = MODES[name]
    residual_bytes = _residual_bytes(cfg, precision)
    for seed in range(cfg.seeds):
      errors = _errors(precision, *_operands(cfg, seed))
      errors = {key: float(value) for key, value in errors.items()}
      row = {'step': step, 'mode': name, 'seed': seed, **errors}
      log(row | residual_bytes)
      step += 1
  print(plots.backward_modes(cfg.workdir, cfg.workdir / 'figures'))


def _operands(cfg, seed):
  """Returns x, w and dy; tokens differ in size, a few features stand out."""
  keys = jax.random.split(jax.random.key(seed), 5)
  x = jax.random.normal(keys[0], (cfg.tokens, cfg.features))
  x *= jnp.exp(0.5 * jax.random.normal(keys[1], (cfg.tokens, 1)))
  x *= jnp.exp(0.5 * jax.random.normal(keys[2], (1, cfg.features)))
  w = jax.random.normal(keys[3], (cfg.features, cfg.features))
  dy = jax.random.normal(keys[4], (cfg.tokens, cfg.features))
  return x.astype(jnp.bfloat16), 0.02 * w, dy.astype(jnp.bfloat16)


def _layer(precision, x, w):
  if precision is None:
    return matmul.unquantized_matmul(x, w)
  stochastic = precision.grad and precision.grad.rounding == 'stochastic'
  key = jax.random.key(0) if stochastic else None
  return matmul.quantized_matmul(x, w, precision, key=key)


@jax.jit(static_argnums=0)
def _errors(precision, x, w, dy):
  y, vjp = jax.vjp(functools.partial(_layer, precision), x, w)
  gradients = vjp(dy)
  exact = _plain(x, w, dy)
  computed = exact
  if precision is not None:
    computed = _plain(*_fprop_operands(precision, x, w), dy)
  return {
      'forward_error': _distance(y, exact[0]),
      'dgrad_error': _distance(gradients[0], exact[1]),
      'wgrad_error': _distance(gradients[1], exact[2]),
      'dgrad_inconsistency': _distance(gradients[0], computed[1]),
      'wgrad_inconsistency': _distance(gradients[1], computed[2]),
  }


def _fprop_operands(precision, x, w):
  """Returns what the forward pass multiplied, float32."""
  xq = quantization.quantize(x, precision.fprop_lhs)
  wq = quantization.quantize(w.astype(jnp.bfloat16), precision.rhs)
  return (
      qtensor.dequantize(xq, jnp.float32),
      qtensor.dequantize(wq, jnp.float32),
  )


def _plain(x, w, dy):
  """Returns y, dgrad and wgrad of the float32 layer."""
  with jax.default_matmul_precision('highest'):
    x, w, dy = (t.astype(jnp.float32) for t in (x, w, dy))
    return x @ w.T, dy @ w, dy.T @ x


def _distance(a, b):
  return jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)


def _residual_bytes(cfg, precision):
  """Returns the bytes kept for the backward pass, by what they belong to.

  Those of activations grow with the tokens; the master weight is in memory
  anyway and does not count.
  """

  def kept(tokens):
    x, w, _ = _operands(dataclasses.replace(cfg, tokens=tokens), 0)
    layer = functools.partial(_layer, precision)
    saved = jax.eval_shape(lambda x, w: jax.vjp(layer, x, w)[1], x, w)
    is_master = lambda leaf: (leaf.shape, leaf.dtype) == (w.shape, w.dtype)
    leaves = [leaf for leaf in jax.tree.leaves(saved) if not is_master(leaf)]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

  activations = kept(2 * cfg.tokens) - kept(cfg.tokens)
  weights = kept(cfg.tokens) - activations
  return {'activation_bytes': activations, 'weight_bytes': weights}


if __name__ == '__main__':
  run.launch(main, PRESETS)
