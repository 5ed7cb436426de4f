"""Times a linear layer's forward and backward pass beside those of others.

    python -m experiments.kernel_bench_linear smoke      # seconds, on a CPU
    python -m experiments.kernel_bench_linear h200       # a minute; one H200

`fwd+bwd` is one program that computes output and both gradients; weights are
float32 masters in ours, bfloat16 in the peers. `wq given` has the quantized
weight as an argument, as in a training step, where a weight is quantized once
for all micro-batches. `temp_bytes` is the most that a program needs besides
arguments and results. `residual_bytes` is what the forward pass leaves to the
backward one, but for what the program is given. Every call is waited for: on a
GPU, look at `device_us`. The rest is as in `kernel_bench`.
"""

from collections.abc import Callable, Iterator
import dataclasses
import importlib
import math
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_bench
from experiments import run
from nvfp4_jax import matmul
from nvfp4_jax import quantization

type Made = kernel_bench.Candidate | tuple[str, Exception]

_BLOCK = 16
_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_WEIGHTS = quantization.QuantSpec('nvfp4', four_over_six='mse')


@dataclasses.dataclass(frozen=True)
class Config(kernel_bench.Config):
  """Flags; those of other workloads are not used."""

  workdir: pathlib.Path = pathlib.Path('runs/kernel_bench_linear')


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_linear_smoke'),
            quantized_shape=(64, 128),  # of the copy
            linear=(32, 64, 128),
            rotated_bytes=1 << 16,
            torch=False,
            calls=1,
            repeats=1,
        ),
    ),
    'h200': ('The workload of one H200.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each candidate, and prints a table."""
  kernel_bench.measure(cfg, log, [workload(cfg)])


def workload(
    cfg: kernel_bench.Config, weights: quantization.QuantSpec = _WEIGHTS
) -> kernel_bench.Workload:
  """Returns the linear layer `cfg.linear` of M, N, K with such weights."""
  m, n, k = cfg.linear
  nbytes = 4.0 * (m * k + m * n + n * k)
  count = kernel_bench.copies(cfg, nbytes)

  def candidates() -> Iterator[Made]:
    quantize = jax.jit(quantization.quantize, static_argnames='spec')
    masters = [operand(seed, m, (n, k), jnp.bfloat16) for seed in range(count)]
    given = [(*o, quantize(bf16(o[1]), spec=weights)) for o in masters]
    for backward in ('dequantized', 'high_precision'):
      precision = matmul.MatmulPrecision(_TOKEN, weights, backward=backward)
      layer = lambda x, w, wq=None, precision=precision: (
          matmul.quantized_matmul(x, w, precision, wq=wq)
      )
      yield layer_candidate(f'nvfp4 {backward}', layer, masters)
      yield layer_candidate(f'nvfp4 {backward}, wq given', layer, given)
    yield layer_candidate('bf16', matmul.unquantized_matmul, masters)
    # Peers have their own layout, `[K, N]`.
    plain = [(x, bf16(w.T), dy) for x, w, dy in masters]
    yield layer_candidate('jax bf16', jnp.dot, plain)
    yield layer_candidate('qwix nvfp4', _qwix_dot, plain)
    del masters, given, plain
    yield from kernel_bench.torch_linear(cfg, m, n, k, count)

  name = f'linear fwd+bwd {m} x {k} -> {n}'
  return kernel_bench.Workload(name, nbytes, 6.0 * m * n * k, count, candidates)


def _qwix_dot(x, w):
  module = importlib.import_module('qwix._src.core.dot_general_qt')
  config = module.DotGeneralQtConfig(
      lhs_qtype='nvfp4', rhs_qtype='nvfp4', tile_size=_BLOCK
  )
  y = module.dot_general_qt(x, w, (((1,), (0,)), ((), ())), config)
  return y.astype(x.dtype)  # float32 on some devices


def layer_candidate(
    name: str, layer: Callable[..., jax.Array], operands, compared=0
) -> Made:
  """Returns the candidate that computes a layer's output and gradients.

  Operands are tuples of x, w, dy and what else the layer takes after w.
  """

  def both(x, w, dy, *rest):
    y, vjp = jax.vjp(lambda x, w: layer(x, w, *rest), x, w)
    return vjp, (y, *vjp(dy))

  step = lambda *operand: both(*operand)[1]
  made = candidate(name, step, operands, compared)
  if not isinstance(made, kernel_bench.Candidate):
    return made
  saved = jax.eval_shape(lambda *operand: both(*operand)[0], *operands[0])
  _, w, _, *rest = operands[0]
  held = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves((w, rest))}
  bits = sum(
      leaf.size * jax.dtypes.itemsize_bits(leaf.dtype)
      for leaf in jax.tree.leaves(saved)
      if (leaf.shape, leaf.dtype) not in held
  )
  facts = {**made.facts, 'residual_bytes': bits // 8}
  return dataclasses.replace(made, facts=facts)


def candidate(
    name: str, fn: Callable[..., Any], operands: list[Any], compared: int = 0
) -> Made:
  """Returns the candidate that calls `fn` of one operand at a time."""
  try:
    program = jax.jit(fn).lower(*operands[0]).compile()
    leaves = jax.tree.leaves(program(*operands[0]))
  except Exception as error:
    return name, error

  def start():
    for operand in operands:
      jax.block_until_ready(program(*operand))

  result = [np.asarray(leaf) for leaf in leaves[:compared]] or None
  memory = program.memory_analysis()
  facts = {'temp_bytes': memory.temp_size_in_bytes} if memory else {}
  return kernel_bench.Candidate(name, start, lambda _: None, result, facts)


def operand(
    seed: int, m: int, w_shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns x and dy of a dtype, and w, a float32 master, as x, w, dy."""
  *_, n, k = w_shape
  w = random(3 * seed + 2, w_shape, jnp.float32) / math.sqrt(k)
  x, dy = (random(3 * seed + i, (m, c), dtype) for i, c in enumerate((k, n)))
  return x, w, dy


def random(
    seed: int,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> jax.Array:
  """Returns normal numbers."""
  return jax.random.normal(jax.random.key(seed), shape, dtype)


def bf16(x: jax.Array) -> jax.Array:
  """Returns `x` in bfloat16."""
  return x.astype(jnp.bfloat16)


if __name__ == '__main__':
  run.launch(main, PRESETS)
