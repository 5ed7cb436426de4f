"""Times quantizers, layers and exports on a CPU, as `kernel_bench` does.

    python -m experiments.kernel_bench_cpu smoke         # seconds
    python -m experiments.kernel_bench_cpu cpu           # minutes; two cores

Peers are plain JAX and qwix, if it is installed; a row says where it is not.
Each call is waited for, so that calls do not share the cores; `us` is then what
a call takes in all, and `host_us` says nothing else. `fwd+bwd` is one program
that returns the output and both gradients; weights that are trained are float32
masters in ours, bfloat16 in the peers. `temp_bytes` is the most that the
program needs besides arguments and results. `residual_bytes` is what the
forward pass keeps for the backward pass, without weights that it was given.
`equal groups` is one batched matmul, as if all experts had as many rows.
"""

from collections.abc import Iterator
import dataclasses
import functools
import importlib
import importlib.metadata
import math
import os
import pathlib
import tempfile

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from experiments import kernel_bench
from experiments import kernel_bench_linear
from experiments import run
from nvfp4_jax import export
from nvfp4_jax import kernels
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_FOUR_OVER_SIX = quantization.QuantSpec('nvfp4', 'token', four_over_six='mse')
_WEIGHTS = quantization.QuantSpec('nvfp4')
_BLOCK = 16  # of NVFP4
_RECIPE = 'nvfp4_dequantized'  # of the exported model: experts are quantized


@dataclasses.dataclass(frozen=True)
class Config(kernel_bench.Config):
  """Flags; those of other workloads are not used."""

  workdir: pathlib.Path = pathlib.Path('runs/kernel_bench_cpu')
  implementations: tuple[str, ...] = ('reference',)
  torch: bool = False
  quantized_shape: tuple[int, int] = (2048, 2048)
  linear: tuple[int, int, int] = (512, 2048, 1024)  # M, N, K
  tokens: int = 1024
  experts: int = 16
  experts_per_token: int = 2
  expert: tuple[int, int] = (256, 512)  # N, K
  model: model_config.ModelConfig = dataclasses.replace(
      model_config.tiny(512), embed_dim=256, head_dim=64, moe_dim=128
  )
  rotated_bytes: int = 64 << 20
  calls: int = 2
  repeats: int = 5


PRESETS = {
    'smoke': (
        'Seconds on a CPU; run by the tests.',
        Config(
            workdir=pathlib.Path('runs/kernel_bench_cpu_smoke'),
            quantized_shape=(64, 128),
            linear=(32, 64, 128),
            tokens=32,
            experts=4,
            expert=(32, 64),
            model=dataclasses.replace(model_config.tiny(16), num_layers=1),
            rotated_bytes=1 << 16,
            calls=1,
            repeats=1,
        ),
    ),
    'cpu': ('The table in the README.', Config()),
}


def main(cfg: Config, log: run.Log) -> None:
  """Logs one row for each candidate of each workload, and prints a table."""
  linear = kernel_bench_linear.workload(cfg, _WEIGHTS)
  workloads = (*_quantizers(cfg), linear, _grouped(cfg), *_exports(cfg))
  kernel_bench.measure(cfg, log, workloads, labels=_labels)


def _labels():
  try:
    qwix = importlib.metadata.version('qwix')
  except importlib.metadata.PackageNotFoundError:
    qwix = None
  return {'jax': jax.__version__, 'qwix': qwix, 'load': os.getloadavg()[0]}


def _quantizers(cfg) -> Iterator[kernel_bench.Workload]:
  shape = cfg.quantized_shape
  elements = math.prod(shape)
  count = kernel_bench.copies(cfg, 2 * elements)

  def candidates(spec) -> Iterator[kernel_bench_linear.Made]:
    xs = [(kernel_bench_linear.random(seed, shape),) for seed in range(count)]
    for name in cfg.implementations:
      fn = functools.partial(kernels.quantize, spec=spec, implementation=name)
      yield kernel_bench_linear.candidate(name, fn, xs, compared=3)
    if spec.four_over_six:
      plain = functools.partial(kernels.quantize, spec=_TOKEN)
      yield kernel_bench_linear.candidate('without 4/6', plain, xs)
    else:
      yield kernel_bench_linear.candidate('qwix', _qwix_quantize, xs)

  nbytes = elements * (2 + 0.5 + 1 / _BLOCK) + 4 * shape[0]
  rate = {'melem_s': 1e-6 * elements}
  for name, spec in (('', _TOKEN), (' 4/6', _FOUR_OVER_SIX)):
    name = f'quantize nvfp4{name} per token {shape[0]} x {shape[1]}'
    make = functools.partial(candidates, spec)
    yield kernel_bench.Workload(name, nbytes, 0.0, count, make, rate)


def _qwix_quantize(x, axis=1):
  """Returns qwix's codes and E4M3 scales; blocks lie along `axis`."""
  others = set(range(x.ndim)) - {axis}
  quantize = importlib.import_module('qwix').quantize
  q = quantize(x, 'nvfp4', channelwise_axes=others, tiled_axes={axis: _BLOCK})
  return q.qvalue, q.scale.astype(jnp.float8_e4m3fn)


def _grouped(cfg) -> kernel_bench.Workload:
  (n, k), groups = cfg.expert, cfg.experts
  m = cfg.tokens * cfg.experts_per_token
  nbytes = 8.0 * (m * k + groups * n * k + m * n)
  count = kernel_bench.copies(cfg, nbytes)

  def candidates() -> Iterator[kernel_bench_linear.Made]:
    scores = np.random.default_rng(0).random((cfg.tokens, groups))
    chosen = np.argsort(scores)[:, : cfg.experts_per_token]
    sizes = jnp.bincount(chosen.ravel(), length=groups).astype(jnp.int32)
    make = lambda seed: kernel_bench_linear.operand(
        seed, m, (groups, n, k), jnp.float32
    )
    operands = [(*make(seed), sizes) for seed in range(count)]
    ours = functools.partial(matmul.unquantized_matmul, dtype=jnp.float32)
    yield kernel_bench_linear.layer_candidate(
        'reference', ours, operands, compared=1
    )
    plain = [(x, w.swapaxes(1, 2), dy, sizes) for x, w, dy, _ in operands]
    yield kernel_bench_linear.layer_candidate(
        'lax.ragged_dot', lax.ragged_dot, plain, compared=1
    )
    equal = lambda x, w, _: (x.reshape(groups, -1, k) @ w).reshape(m, n)
    yield kernel_bench_linear.layer_candidate('equal groups', equal, plain)
    dense = [(x, w[0], dy, sizes) for x, w, dy, _ in plain]
    yield kernel_bench_linear.layer_candidate(
        'dense ideal', lambda x, w, _: x @ w, dense
    )

  name = f'grouped fwd+bwd float32 {m} x {k} -> {n}, E = {groups}'
  return kernel_bench.Workload(name, nbytes, 6.0 * m * n * k, count, candidates)


def _exports(cfg) -> Iterator[kernel_bench.Workload]:
  quantizer = policy.Quantizer(recipes.get(_RECIPE).sampler)
  layers = policy.segments(
      [quantizer.policy], transformer.param_paths(cfg.model)
  )
  params = transformer.stack(
      transformer.init_params(jax.random.key(0), cfg.model), layers
  )
  weights = [item for layer in params['layers'] for item in layer.items()]
  experts = [w for name, w in weights if name.startswith('mlp.experts.')]
  quantize = functools.partial(policy.quantize_params, quantizer, params)

  def quantizers() -> Iterator[kernel_bench_linear.Made]:
    yield kernel_bench.Candidate('reference', quantize, jax.block_until_ready)
    fn = lambda *ws: [_qwix_quantize(w, w.ndim - 1) for w in ws]
    yield kernel_bench_linear.candidate('qwix', fn, [tuple(experts)])
    fn = lambda *ws: [
        kernels.quantize(kernel_bench_linear.bf16(w), _WEIGHTS) for w in ws
    ]
    yield kernel_bench_linear.candidate('quantizer alone', fn, [tuple(experts)])

  def exporters() -> Iterator[kernel_bench_linear.Made]:
    tree = quantize()
    target = export.Target(quantizer.policy, recipe=_RECIPE)

    def write():
      with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / 'model'
        export.export(cfg.model, tree, path, target)

    yield kernel_bench.Candidate('reference', write, lambda _: None)

  for name, leaves, make in (
      ('quantize experts', experts, quantizers),
      ('export to a folder', jax.tree.leaves(params), exporters),
  ):
    millions = 1e-6 * sum(leaf.size for leaf in leaves)
    name, rate = f'{name}, {millions:.2f} M', {'mparam_s': millions}
    yield kernel_bench.Workload(name, 4e6 * millions, 0.0, 1, make, rate)


if __name__ == '__main__':
  run.launch(main, PRESETS)
