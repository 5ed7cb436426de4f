"""Which implementation of a kernel runs here.

Modules of Triton kernels are imported where they run: Triton is an optional
dependency.
"""

from collections.abc import Callable
import functools
import logging
import types

import jax

_LOWEST_CAPABILITY = 9.0  # from here on, Triton converts to E4M3 in hardware
_log = logging.getLogger('nvfp4_jax.kernels')


@functools.cache
def cannot_run_triton() -> str | None:
  """Returns why Triton kernels cannot run here, or None if they can."""
  backend = jax.default_backend()
  if backend != 'gpu':
    return f'the default backend is {backend}, and Triton kernels need a GPU'
  if compute_capability() < _LOWEST_CAPABILITY:
    return (
        f'compute capability {compute_capability()} is below'
        f' {_LOWEST_CAPABILITY}'
    )
  try:
    import triton
  except ImportError as error:
    return f'triton cannot be imported ({error})'
  del triton
  return None


def compute_capability() -> float:
  """Returns that of the first device, or 0.0 if it is no NVIDIA GPU."""
  try:
    return float(getattr(jax.devices()[0], 'compute_capability', 0.0))
  except ValueError:
    return 0.0


def why_not_triton(implementation: str | None) -> str | None:
  """Returns why Triton is not to be asked whether it can, or None."""
  if implementation == 'reference':
    return 'the reference was named'
  return cannot_run_triton() or cannot_shard(implementation)


def is_triton(
    function: str,
    implementation: str | None,
    unsupported: Callable[[], str | None],
) -> bool:
  """Returns whether Triton runs, and logs what was chosen.

  Args:
    function: that asks, for messages.
    implementation: that was named, or None.
    unsupported: returns why Triton cannot do this, or None; called where it can
      run at all.

  Raises:
    NotImplementedError: Triton was named, but cannot.
  """
  problem = why_not_triton(implementation)
  if problem is None:
    problem = unsupported()
  if implementation == 'triton' and problem is not None:
    raise NotImplementedError(f'{function}: {problem}.')
  if implementation is None:
    chosen = 'triton' if problem is None else 'reference'
    log_once(function, chosen, problem)
  return problem is None


def cannot_shard(implementation: str | None) -> str | None:
  """Returns why an automatic choice must not be Triton on several devices."""
  if implementation is not None or jax.device_count() == 1:
    return None
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.empty and set(mesh.manual_axes) == set(mesh.axis_names):
    return None
  return 'XLA cannot divide a Triton kernel among several devices'


def triton_quantize() -> types.ModuleType:
  """Returns the module of the quantizers."""
  from nvfp4_jax.kernels import triton_quantize

  return triton_quantize


def triton_decode() -> types.ModuleType:
  """Returns the module of the decoders of NVFP4."""
  from nvfp4_jax.kernels import triton_decode

  return triton_decode


def triton_matmul() -> types.ModuleType:
  """Returns the module of matmuls with quantized weights, for this GPU."""
  from nvfp4_jax.kernels import triton_blackwell
  from nvfp4_jax.kernels import triton_matmul

  is_blackwell = compute_capability() in triton_blackwell.CAPABILITIES
  return triton_blackwell if is_blackwell else triton_matmul


def triton_few() -> types.ModuleType:
  """Returns the module of matmuls of few rows."""
  from nvfp4_jax.kernels import triton_few

  return triton_few


def triton_grouped() -> types.ModuleType:
  """Returns the module of grouped matmuls."""
  from nvfp4_jax.kernels import triton_grouped

  return triton_grouped


def triton_norm() -> types.ModuleType:
  """Returns the module of RMSNorm of rows."""
  from nvfp4_jax.kernels import triton_norm

  return triton_norm


def triton_attention() -> types.ModuleType:
  """Returns the module of attention of a token."""
  from nvfp4_jax.kernels import triton_attention

  return triton_attention


def triton_sequences() -> types.ModuleType:
  """Returns the module of attention of whole sequences."""
  from nvfp4_jax.kernels import triton_sequences

  return triton_sequences


@functools.cache
def log_once(function: str, implementation: str, reason: str | None) -> None:
  """Logs a choice, and why it was made."""
  why = f', since {reason}' if reason else ''
  _log.info('%s: implementation %r%s.', function, implementation, why)
