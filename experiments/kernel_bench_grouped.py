"""Times grouped matmuls, those of a mixture of experts, as `kernel_bench` does.

    python -m experiments.kernel_bench_grouped smoke     # seconds, on a CPU
    python -m experiments.kernel_bench_grouped h200      # minutes; one H200

Shapes are those of Qwen3-30B-A3B with 4096 tokens that meet 8 of 128 experts
each: rows are shared out at random, and one expert has none. `dense ideal` is
one matmul of all rows with a single expert: the same FLOPs without groups.
`ragged_dot_mgpu` is JAX's Pallas kernel, which writes bfloat16, half the bytes.
"""

from collections.abc import Callable, Iterator
import dataclasses
import functools
import importlib
import pathlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_bench
from experiments import run
from nvfp4_jax import kernels
from nvfp4_jax import quantization

_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_WEIGHTS = quantization.QuantSpec('nvfp4', four_over_six='mse')
_BFLOAT16_TILES = [
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 256, 8, 3),
    (128, 256, 8, 4),
    (64, 128, 8, 4),
    (64, 256, 8, 3),
    (64, 128, 4, 4),
]
_NVFP4_TILES = [
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 64, 4, 2),
    (128, 64, 4, 3),
    (256, 128, 8, 2),
    (64, 128, 8, 3),
    (64, 64, 4, 4),
]
_WGRAD_TILES = [
    (128, 128, 8, 2),
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (128, 256, 8, 3),
    (256, 128, 8, 3),
]
# What is contracted: columns with columns (forward) or rows (dgrad) of w, or
# the rows of both (wgrad).
_FORWARD = (((1,), (2,)), ((), ()))
_DGRAD = (((1,), (1,)), ((), ()))
_WGRAD = (((0,), (0,)), ((), ()))


@dataclasses.dataclass(frozen=True)
class Config(kernel_bench.Config):
  """Flags; those of other workloads are not used."""

  workdir: pathlib.Path = pathlib.Path('runs/kernel_bench_grouped')
  experts: int = 128
  rows: int = 32768
  gate_up: tuple[int, int] = (1536, 2048)  # N, K
  down: tuple[int, int] = (2048, 768)


PRESETS = {
    'smoke': (
        'The reference on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_grouped_smoke'),
            implementations=('reference',),
            torch=False,
            quantized_shape=(64, 128),
            experts=4,
            rows=48,
            gate_up=(64, 128),
            down=(128, 64),
            rotated_bytes=1 << 16,
            calls=2,
            repeats=3,
        ),
    ),
    'h200': ('A layer of Qwen3-30B-A3B on one H200.', Config()),
}


@dataclasses.dataclass(frozen=True)
class _Task:
  """One of the grouped matmuls.

  Attributes:
    name: as in the table.
    function: of `kernels`.
    make: returns an operand from a seed: a tuple for `function`, sizes last.
    contract: which dimensions are contracted, of bfloat16; None if quantized.
    tiles: of a sweep.
  """

  name: str
  function: Callable[..., jax.Array]
  make: Callable[[int], tuple[Any, ...]]
  contract: Any
  tiles: list[tuple[int, int, int, int]]


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each candidate of each workload, and prints a table."""
  kernel_bench.measure(cfg, log, _workloads(cfg))


def group_sizes(rows: int, experts: int) -> np.ndarray:
  """Returns random sizes, int32 `[experts]`, of which one is 0."""
  share = np.full(experts, 1 / (experts - 1))
  share[experts // 2] = 0
  sizes = np.random.default_rng(0).multinomial(rows, share)
  return sizes.astype(np.int32)


def _workloads(cfg) -> Iterator[kernel_bench.Workload]:
  m, experts = cfg.rows, cfg.experts
  for n, k in (cfg.gate_up, cfg.down):
    x, dy, w, dw = m * k, m * n, experts * n * k, experts * n * k
    nvfp4 = 0.5 + 1 / 16
    for task, nbytes in zip(
        _tasks(cfg, n, k),
        (
            2 * (x + w) + 4 * dy,
            nvfp4 * (x + w) + 4 * dy,
            2 * (dy + w) + 4 * x,
            2 * (dy + x) + 4 * dw,
        ),
        strict=True,
    ):
      count = kernel_bench.copies(cfg, nbytes)
      candidates = functools.partial(_candidates, cfg, task, n, k, count)
      yield kernel_bench.Workload(
          f'{task.name} {m} x {k} -> {n}, E = {experts}',
          nbytes,
          2.0 * m * n * k,
          count,
          candidates,
      )


def _tasks(cfg, n, k) -> list[_Task]:
  m, experts = cfg.rows, cfg.experts
  sizes = group_sizes(m, experts)
  x = lambda seed: _random(2 * seed, (m, k))
  dy = lambda seed: _random(2 * seed + 1, (m, n))
  w = lambda seed: _random(2 * seed + 1, (experts, n, k))
  quantize = jax.jit(quantization.quantize, static_argnames='spec')

  def quantized(seed):
    return quantize(x(0), spec=_TOKEN), quantize(w(seed), spec=_WEIGHTS), sizes

  linear = 'grouped linear forward'
  return [
      _Task(
          f'{linear} bf16',
          kernels.matmul,
          lambda seed: (x(0), w(seed), sizes),
          _FORWARD,
          _BFLOAT16_TILES,
      ),
      _Task(
          f'{linear} W4A4',
          kernels.scaled_matmul,
          quantized,
          None,
          _NVFP4_TILES,
      ),
      _Task(
          'grouped dgrad',
          kernels.dgrad,
          lambda seed: (dy(0), w(seed), sizes),
          _DGRAD,
          _BFLOAT16_TILES,
      ),
      _Task(
          'grouped wgrad',
          kernels.wgrad,
          lambda seed: (dy(seed), x(seed), sizes),
          _WGRAD,
          _WGRAD_TILES,
      ),
  ]


def _candidates(cfg, task, n, k, count):
  operands = [jax.device_put(task.make(seed)) for seed in range(count)]
  for name in cfg.implementations:
    yield _ours(task, name, operands, implementation=name)
  for tile in task.tiles if cfg.sweep else ():
    name = f'triton {tile}'
    yield _ours(task, name, operands, implementation='triton', tile=tile)
  if task.contract:
    fn = functools.partial(_ragged_dot, task.contract)
    yield kernel_bench.jax_candidate('lax.ragged_dot', fn, operands)
  if task.contract in (_FORWARD, _DGRAD):
    for block in (64, 128):
      fn = functools.partial(_mgpu, task.contract is _FORWARD, block)
      name = f'ragged_dot_mgpu {block}'
      yield _peer(name, fn, operands)
  del operands
  pairs = [(_random(0, (cfg.rows, k)), _random(1, (n, k)))] * count
  yield _peer('dense ideal', lambda pair: kernels.matmul(*pair), pairs)


def _ours(task, name, operands, **options):
  fn = lambda operand: task.function(*operand, **options)
  return kernel_bench.jax_candidate(name, fn, operands)


def _peer(name, fn, operands):
  """Returns a candidate whose result is something else."""
  made = kernel_bench.jax_candidate(name, fn, operands)
  if isinstance(made, kernel_bench.Candidate):
    return dataclasses.replace(made, result=None)
  return made


def _ragged_dot(contract, operand):
  a, b, sizes = operand
  numbers = lax.RaggedDotDimensionNumbers(
      dot_dimension_numbers=contract,
      lhs_ragged_dimensions=[0],
      rhs_group_dimensions=[] if contract is _WGRAD else [0],
  )
  return lax.ragged_dot_general(
      a, b, sizes, numbers, preferred_element_type=jnp.float32
  )


def _mgpu(is_transposed, block, operand):
  module = importlib.import_module(
      'jax.experimental.pallas.ops.gpu.ragged_dot_mgpu'
  )
  a, w, sizes = operand
  return module.ragged_dot(
      a,
      w,
      group_sizes=sizes,
      block_m=block,
      block_n=128,
      block_k=64,
      max_concurrent_steps=4,
      grid_block_n=1,
      transpose_rhs=is_transposed,
  )


def _random(seed, shape):
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


if __name__ == '__main__':
  run.launch(main, PRESETS)
