"""Calls of Triton kernels from JAX.

Triton compiles a kernel to PTX when the call is traced; XLA launches it like a
kernel of its own (its custom call `__gpu$xla.gpu.ptx`), also in CUDA graphs.
Shapes are constants of a kernel: no scalar is passed at run time.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import re
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import triton
from triton.backends import compiler as backends
from triton.compiler import compiler

PROCESSORS = 132  # of an H200
_TARGET = '__gpu$xla.gpu.ptx'
_TYPES = {
    'bfloat16': '*bf16',
    'float16': '*fp16',
    'float32': '*fp32',
    'float8_e4m3fn': '*fp8e4nv',
    'int32': '*i32',
    'uint8': '*u8',
}


def call(
    kernel: triton.JITFunction,
    *arrays: jax.Array,
    out_shape: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, ...],
    num_warps: int,
    num_stages: int = 3,
    aliases: Mapping[int, int] | None = None,
    **constants: int | float | bool,
) -> list[jax.Array]:
  """Returns the outputs of a kernel; without vmap rule and derivative.

  Args:
    kernel: its arguments are the arrays, the outputs and then constants.
    *arrays: row-major, 16-byte aligned.
    out_shape: shapes and dtypes of the outputs.
    grid: numbers of programs along up to three axes.
    num_warps: warps of 32 threads of a program.
    num_stages: steps of a loop that are loaded ahead.
    aliases: arrays, by number, and the outputs that are written in their place;
      a kernel is to use the latter only.
    **constants: the kernel's tl.constexpr arguments.

  Raises:
    TypeError: a dtype that has no pointer here.
    NotImplementedError: the kernel needs scratch memory.
    ValueError: what Triton compiled has no entry of the kernel's name.
  """
  pointers = tuple(_pointer(a.dtype) for a in (*arrays, *out_shape))
  compiled = compile_kernel(
      kernel,
      pointers,
      tuple(constants.items()),
      num_warps,
      num_stages,
      _capability(),
  )
  ptx, metadata = compiled.asm['ptx'], compiled.metadata
  if metadata.global_scratch_size:
    raise NotImplementedError(f'{metadata.name} needs scratch memory.')
  # Triton's own last parameters are pointers to scratch memory, unused here.
  spare = _num_parameters(ptx, metadata.name) - len(pointers)
  grid_dims = (*grid, 1, 1)[:3]
  launch = {
      'name': metadata.name,
      'kernel_type': 'ptx',
      'kernel_data': ptx,
      'shared_mem_bytes': np.int32(metadata.shared),
      'output_indices': tuple(range(len(arrays), len(pointers))),
  }
  for axis, programs, threads in zip(
      'xyz', grid_dims, (32 * metadata.num_warps, 1, 1), strict=True
  ):
    launch[f'grid_{axis}'] = np.int32(programs)
    launch[f'block_{axis}'] = np.int32(threads)
  function = jax.ffi.ffi_call(
      _TARGET, list(out_shape), input_output_aliases=dict(aliases or {})
  )
  outputs = function(*arrays, *[arrays[0]] * spare, **launch)
  # Inside `shard_map`, XLA's call does not say along which axes they vary.
  varying = lambda x: jax.typeof(x).manual_axis_type.varying
  axes = frozenset().union(*map(varying, arrays))
  return [lax.pcast(y, tuple(axes - varying(y)), to='varying') for y in outputs]


def with_vmap(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Returns `fn` of arrays; under vmap, the axis is one more leading axis.

  Args:
    fn: of arrays, all with any number of leading axes that broadcast nothing;
      a module's function or a partial of one, so that programs are found again.
  """
  run = jax.custom_batching.custom_vmap(fn)

  @run.def_vmap
  def _(lanes, batched, *arrays):
    arrays = [
        array if flag else jnp.broadcast_to(array, (lanes, *array.shape))
        for array, flag in zip(arrays, batched, strict=True)
    ]
    outputs = run(*arrays)
    return outputs, jax.tree.map(lambda _: True, outputs)

  return run


@functools.cache
def compile_kernel(
    kernel: triton.JITFunction,
    pointers: tuple[str, ...],
    constants: tuple[tuple[str, int | float | bool], ...],
    num_warps: int,
    num_stages: int,
    capability: int,
) -> compiler.CompiledKernel:
  """Returns what Triton makes of a kernel, for a GPU that need not be here.

  No product is contracted with a sum: every float32 operation rounds.

  Args:
    kernel: see `call`.
    pointers: Triton's names for the types of its arrays, such as '*bf16'.
    constants: names and values of the others.
    num_warps: see `call`.
    num_stages: see `call`.
    capability: ten times the compute capability, such as 90.
  """
  names = kernel.arg_names
  values = dict(constants)
  signature = dict(zip(names, pointers, strict=False))
  signature |= {name: 'constexpr' for name in names[len(pointers) :]}
  source = compiler.ASTSource(
      fn=kernel,
      signature=signature,
      constexprs={
          (i,): values[name]
          for i, name in enumerate(names)
          if i >= len(pointers)
      },
      attrs={(i,): [['tt.divisibility', 16]] for i in range(len(pointers))},
  )
  options = {
      'num_warps': num_warps,
      'num_stages': num_stages,
      'enable_fp_fusion': False,
  }
  target = backends.GPUTarget('cuda', capability, 32)
  return compiler.compile(source, target=target, options=options)


def _pointer(dtype) -> str:
  name = np.dtype(dtype).name
  if name not in _TYPES:
    raise TypeError(f'Triton kernels here have no {name}; only {[*_TYPES]}.')
  return _TYPES[name]


def _capability() -> int:
  major, minor = jax.devices()[0].compute_capability.split('.')
  return 10 * int(major) + int(minor)


def _num_parameters(ptx: str, name: str) -> int:
  """Returns how many parameters the entry of a PTX module has."""
  entry = re.search(rf'\.entry {re.escape(name)}\(([^)]*)\)', ptx)
  if entry is None:
    raise ValueError(f'PTX has no entry {name}.')
  return entry.group(1).count('.param')
