"""What each format and option costs in accuracy, and which tokens it leaks to.

    python -m experiments.quantization_error smoke
    python -m experiments.quantization_error figure     # 1 minute on two cores

Rows of three kinds: `grid`, the values that a block can take, divided by its
amax, and the worst error of such a block; `error`, SQNR and the three parts of
the error for random matrices; `leak`, how many values of the other tokens
change when one token grows. colab/01_formats.ipynb draws the figure.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments import plots
from experiments import run
from nvfp4_jax import diagnostics
from nvfp4_jax import formats
from nvfp4_jax import hadamard
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_Spec = quantization.QuantSpec

SPECS = {
    'mxfp4': _Spec('mxfp4'),
    'nvfp4': _Spec('nvfp4'),
    'nvfp4 2D': _Spec('nvfp4', block_2d=True),
    'nvfp4 per token': _Spec('nvfp4', 'token'),
    'nvfp4 4/6': _Spec('nvfp4', four_over_six='mse'),
    'nvfp4 4/6 per token': _Spec('nvfp4', 'token', four_over_six='mse'),
    'nvfp4 RHT': _Spec('nvfp4', hadamard=True),
    'fp8_block': _Spec('fp8_block'),
    'mxfp8': _Spec('mxfp8'),
}


@dataclasses.dataclass(frozen=True)
class Config:
  """Flags."""

  workdir: pathlib.Path = pathlib.Path('runs/quantization_error')
  tokens: int = 1024  # rows of a matrix; a multiple of 32
  features: int = 2048  # columns; a multiple of 128
  seeds: int = 3
  growth: tuple[float, ...] = (1, 4, 16, 64, 256, 1024)  # of one token
  specs: tuple[str, ...] = tuple(SPECS)  # names in SPECS

  def __post_init__(self):
    for name in self.specs:
      if name not in SPECS:
        raise ValueError(f'spec {name!r} is not one of {sorted(SPECS)}.')


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/quantization_error_smoke'),
            tokens=32,
            features=128,
            seeds=1,
            growth=(1, 64),
            specs=('nvfp4', 'nvfp4 per token'),
        ),
    ),
    'figure': ('The figure in the README.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs all rows and draws the figure."""
  log.rewind(0)
  rows = [*_grids(), *_errors(cfg), *_leaks(cfg)]
  for step, row in enumerate(rows):
    log({'step': step, **row})
  print(plots.quantization_error(cfg.workdir, cfg.workdir / 'figures'))


def _grids():
  """Yields E2M1 mapped to 6 and to 4, and E4M3."""
  e2m1 = np.asarray(formats.decode_e2m1(jnp.arange(8, dtype=jnp.uint8)))
  e4m3 = np.arange(127, dtype=np.uint8).view(formats.MXFP8.elem_dtype)
  e4m3 = e4m3.astype(np.float32)
  for name, values in (
      ('E2M1, map to 6', e2m1),
      ('E2M1, map to 4', e2m1[e2m1 <= 4]),
      ('E4M3', e4m3),
  ):
    values = values / values.max()
    worst = float(np.diff(values).max() / 2)
    row = {'kind': 'grid', 'name': name, 'worst_error': worst}
    yield row | {'values': values.tolist()}


def _errors(cfg):
  for seed in range(cfg.seeds):
    for distribution, x in _matrices(cfg, seed).items():
      for name in cfg.specs:
        stats = _stats(x, SPECS[name])
        row = {'kind': 'error', 'distribution': distribution, 'name': name}
        yield row | {'seed': seed, **{k: float(v) for k, v in stats.items()}}


def _leaks(cfg):
  """Yields the share of the other tokens' values that one token changes."""
  x = _matrices(cfg, 0)['normal']
  for name in cfg.specs:
    if name not in ('nvfp4', 'nvfp4 per token', 'mxfp8'):
      continue
    before = _values(x, SPECS[name])
    for growth in cfg.growth:
      after = _values(x.at[0].multiply(growth), SPECS[name])
      changed = float(jnp.mean(before[1:] != after[1:]))
      yield {'kind': 'leak', 'name': name, 'growth': growth, 'changed': changed}


def _matrices(cfg, seed):
  """Returns bfloat16 matrices by the name of their distribution."""
  keys = jax.random.split(jax.random.key(seed), 4)
  shape = (cfg.tokens, cfg.features)
  normal = jax.random.normal(keys[0], shape)
  scale = jnp.exp(2 * jax.random.normal(keys[1], (cfg.tokens, 1)))
  outlier = jax.random.bernoulli(keys[2], 0.005, shape)
  matrices = {
      'normal': normal,
      'tokens of many sizes': normal * scale,
      'outliers': jnp.where(outlier, 30 * normal, normal),
      'student-t, 3': jax.random.t(keys[3], 3.0, shape),
  }
  return {name: x.astype(jnp.bfloat16) for name, x in matrices.items()}


def _stats(x, spec):
  if spec.hadamard:  # the error of what is quantized
    x = hadamard.transform(x)
    spec = dataclasses.replace(spec, hadamard=False)
  return dataclasses.asdict(_jitted_stats(x, spec))


@jax.jit(static_argnums=1)
def _jitted_stats(x, spec):
  q = quantization.quantize(x, spec)
  return diagnostics.quantization_stats(x, q)


@jax.jit(static_argnums=1)
def _values(x, spec):
  return qtensor.dequantize(quantization.quantize(x, spec), jnp.float32)


if __name__ == '__main__':
  run.launch(main, PRESETS)
