"""What Triton makes of our kernels for GPUs that are not here: `make aot`."""

import functools
import pathlib
import re
import subprocess
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import pytest

from nvfp4_jax import quantization

triton = pytest.importorskip('triton')
if triton.knobs.runtime.interpret:
  pytest.skip('TRITON_INTERPRET is set.', allow_module_level=True)

from nvfp4_jax.kernels import triton_attention  # noqa: E402
from nvfp4_jax.kernels import triton_blackwell  # noqa: E402
from nvfp4_jax.kernels import triton_call  # noqa: E402
from nvfp4_jax.kernels import triton_decode  # noqa: E402
from nvfp4_jax.kernels import triton_few  # noqa: E402
from nvfp4_jax.kernels import triton_grouped  # noqa: E402
from nvfp4_jax.kernels import triton_matmul  # noqa: E402
from nvfp4_jax.kernels import triton_norm  # noqa: E402
from nvfp4_jax.kernels import triton_quantize  # noqa: E402
from nvfp4_jax.kernels import triton_sequences  # noqa: E402

pytestmark = pytest.mark.aot

_TOOLS = pathlib.Path(triton.__file__).parent / 'backends/nvidia/bin'
_TYPES = {
    'x_ptr': '*bf16',
    'amax_ptr': '*fp32',
    'own_ptr': '*fp32',
    'data_ptr': '*u8',
    'codes_ptr': '*u8',
    'scale_ptr': '*fp8e4nv',
    'decode_ptr': '*fp32',
    'outer_ptr': '*fp32',
    'y_ptr': '*fp32',
    'global_ptr': '*fp32',
    'index_ptr': '*i32',
    'steps_ptr': '*i32',
    'x_scale_ptr': '*u8',
    'w_ptr': '*u8',
    'w_scale_ptr': '*u8',
    'x_outer_ptr': '*fp32',
    'w_outer_ptr': '*fp32',
    'plan_ptr': '*i32',
    'bounds_ptr': '*i32',
    'dy_ptr': '*bf16',
    'dw_ptr': '*fp32',
    'cos_ptr': '*fp32',
    'sin_ptr': '*fp32',
    'layer_ptr': '*i32',
    'length_ptr': '*i32',
    'largest_ptr': '*fp32',
    'scratch_ptr': '*fp32',
    'sums_ptr': '*fp32',
    'shift_ptr': '*fp32',
    'delta_ptr': '*fp32',
    'q_index_ptr': '*i32',
    'k_index_ptr': '*i32',
    **{
        f'{name}_ptr': '*bf16'
        for name in ('gain', 'total', 'normed', 'q', 'k', 'v')
        + ('q_gain', 'k_gain', 'k_in', 'v_in', 'k_cache', 'v_cache')
        + ('out', 'dout', 'dq', 'dk', 'dv')
    },
}
_SHAPE = dict(M=8192, K=4096)
_ROWS = _SHAPE | dict(
    E=448, FOUR=False, MSE=False, FAST=False, ROWS=1, BLOCKS=256
)
_FOUR = _ROWS | dict(E=256, FOUR=True, MSE=True)
_MX = _SHAPE | dict(FP8=True, SQUARES=False, ROWS=4, BLOCKS=64)
_WEIGHTS = dict(K=1024, N0=2048, N1=1024, N2=1000, INDEXED=True)
_FEW = _WEIGHTS | dict(M=16, ROWS=16, FEATURES=64)
_NVFP4_FEW = _FEW | dict(UNIT=128**2, SCALED=True, P0=2, P1=2, P2=1)
_BFLOAT16_FEW = _FEW | dict(STEP=128, ROWS=64, FEATURES=32)
_BFLOAT16_ROW = _FEW | dict(STEP=512, M=1, ROWS=16, FEATURES=16)
_SWIGLU = dict(M=64, N=3072, K=1024, INDEXED=True, ROWS=64, FEATURES=32)
_SWIGLU |= dict(STEP=128)
_MANY = dict(N=4096, K=4096, PARTS=2, UNIT=128, SHARED=True)
_MANY |= dict(M=2048, ROWS=128, FEATURES=128)
_ATTENTION = dict(B=16, L=28, S=2048, HEADS=8, GROUP=2, D=128, GAINS=28)
_ATTENTION |= dict(EPS=1e-6, SCALE=128**-0.5, COLUMNS=8)
_ATTENTION |= dict(LIVE=256, BLOCK=64, HEIGHT=2)
_LONG = dict(S=1 << 15, LIVE=1 << 12, HEIGHT=6)
_SEQUENCES = dict(B=32, T=256, HEADS=16, GROUP=2, D=128, ROWS=64, KEYS=64)
_FORWARD_TILES = _SEQUENCES | dict(HALVES=1, LEVELS=0, CHANNELS=32, SAVES=True)
_LONG_SEQUENCES = [
    _FORWARD_TILES | dict(T=t, LEVELS=levels, HALVES=halves, D=dim)
    for t, levels in ((300, 1), (4096, 4), (1 << 15, 7))
    for halves in (1, 2)
    for dim in (64, 128)
]
_GRADIENTS = [
    (triton_sequences.query_gradient, _SEQUENCES, 2),
    (triton_sequences.query_gradient, _SEQUENCES | dict(T=300), 2),
    (triton_sequences.query_gradient, _SEQUENCES | dict(D=64), 2),
    (triton_sequences.key_gradient, _SEQUENCES | dict(ROWS=32), 3),
    (triton_sequences.key_gradient, _SEQUENCES | dict(ROWS=32, T=300), 3),
    (triton_sequences.key_gradient, _SEQUENCES | dict(D=64), 3),
]
_NORM = dict(D=1024, L=28, BLOCK=1024, EPS=1e-6, ADD=True)
_DECODE = dict(WORDS=1 << 20, PER_SCALE=512, BLOCK=512)
_STEPS = dict(STEPS=1 << 17, BLOCK=32)
_NVFP4 = dict(M=2048, N=4096, K=4096, NVFP4=True)
_NVFP4 |= dict(ROWS=128, FEATURES=128, STEP=256)
_MXFP8 = _NVFP4 | dict(NVFP4=False, STEP=128)
_ROUTED = dict(E=128, F=1536, C=2048, BLOCKS=385, ROWS=128, FEATURES=128)
_FORWARD, _DGRAD = _ROUTED | dict(LAST=True), _ROUTED | dict(LAST=False)
_EXPERTS = _ROUTED | dict(UNIT=128)
_WGRAD = dict(E=128, N=1536, K=2048, COLUMNS=128, FEATURES=128)
_GROUPED = [
    (triton_grouped.bfloat16_rows, _FORWARD, 8, 128),
    (triton_grouped.bfloat16_rows, _FORWARD | dict(ROWS=16), 4, 64),
    (triton_grouped.bfloat16_rows, _FORWARD | dict(FEATURES=256), 8, 255),
    (triton_grouped.bfloat16_rows, _DGRAD, 8, 128),
    (triton_grouped.bfloat16_rows, _DGRAD | dict(ROWS=32), 4, 128),
    (triton_grouped.bfloat16_groups, _WGRAD, 8, 128),
    (triton_grouped.nvfp4_rows, _EXPERTS, 8, 255),
    (triton_grouped.nvfp4_rows, _EXPERTS | dict(ROWS=64), 8, 128),
    (triton_grouped.nvfp4_rows, _EXPERTS | dict(ROWS=16, FEATURES=64), 4, 128),
]


def _compile(kernel, capability, num_warps, num_stages, constants, x='*bf16'):
  """Returns the compiled kernel."""
  types = _TYPES | {'x_ptr': x, 'w_ptr': x}
  names = (re.sub(r'\d_ptr', '_ptr', name) for name in kernel.arg_names)
  return triton_call.compile_kernel(
      kernel,
      tuple(types[name] for name in names if name.endswith('_ptr')),
      tuple(constants.items()),
      num_warps,
      num_stages,
      capability,
  )


def _usage(compiled):
  """Returns registers a thread, and bytes of stack that they spill to."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'kernel.cubin'
    path.write_bytes(compiled.asm['cubin'])
    command = [_TOOLS / 'cuobjdump', '-res-usage', path]
    text = subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout
  return tuple(map(int, re.search(r'REG:(\d+) STACK:(\d+)', text).groups()))


def _early_writes(ptx):
  """Returns how many loops there are with wgmma, and what is wrong in them.

  That is each instruction that writes to a register which holds the left
  operand of a wgmma that was not yet waited for, in this round or the last.
  """
  lines = [line.strip() for line in ptx.splitlines()]
  labels = {}
  for number, line in enumerate(lines):
    if label := re.match(r'(\$L\w+):', line):
      labels[label[1]] = number
  loops, found = 0, []
  for number, line in enumerate(lines):
    branch = re.match(r'(?:@!?%p\d+ )?bra(?:\.uni)?\s+(\$L\w+);', line)
    if branch is None or labels[branch[1]] > number:
      continue
    body = lines[labels[branch[1]] : number]
    loops += any('wgmma.mma_async' in x for x in body)
    busy = set()
    for x in 2 * body:
      if 'wgmma.mma_async' in x:
        operands = re.findall(r'\{([^}]*)\}', x)
        if len(operands) > 1:  # the left operand is not in shared memory
          busy |= set(re.findall(r'%\w+', operands[1]))
      elif re.match(r'wgmma\.wait_group\.sync\.aligned\s+0', x):
        busy = set()
      else:
        written = re.match(
            r'(?:@!?%p\d+ )?(?!st|cp|ba?r)[a-z][\w.:]*\s+(\{[^}]*\}|%\w+)', x
        )
        if written and busy & set(re.findall(r'%\w+', written[1])):
          found.append(x)
  return loops, found


class CompilationTest(chex.TestCase):

  @parameterized.parameters(
      (triton_quantize.nvfp4_rows, _ROWS, 4, 64),
      (triton_quantize.nvfp4_rows, _FOUR, 4, 128),
      (triton_quantize.nvfp4_rows, _FOUR, 8, 64),
      (triton_quantize.mx_tiles, _MX, 4, 64),
      (triton_few.nvfp4_few, _NVFP4_FEW, 4, 128),
      (triton_few.nvfp4_few, _NVFP4_FEW | dict(M=128, ROWS=128), 4, 255),
      (triton_few.bfloat16_few, _BFLOAT16_FEW, 4, 192),
      (triton_few.bfloat16_few, _BFLOAT16_FEW | dict(M=256, ROWS=128), 8, 192),
      (triton_few.bfloat16_few, _BFLOAT16_ROW, 2, 192),
      (triton_few.bfloat16_swiglu, _SWIGLU, 4, 192),
      (
          triton_few.bfloat16_swiglu,
          _SWIGLU | dict(ROWS=16, FEATURES=16),
          2,
          192,
      ),
      (triton_attention.token_attention, _ATTENTION, 4, 168),
      (triton_attention.token_attention, _ATTENTION | _LONG, 4, 255),
      (triton_norm.norm_rows, _NORM, 1, 192),
      (triton_decode.nvfp4_decode, _DECODE, 4, 64),
      (triton_decode.nvfp4_decode_permuted, _STEPS, 4, 128),
      (triton_matmul.bfloat16_matmul, _MANY, 8, 255),
      *_GROUPED,
  )
  def test_hopper_kernels_spill_nothing(self, kernel, static, warps, most):
    registers, stack = _usage(_compile(kernel, 90, warps, 3, static))
    self.assertLessEqual(registers, most)
    self.assertEqual(stack, 0)

  @parameterized.product(halves=(1, 2), dim=(64, 128), length=(256, 250))
  def test_attention_of_short_sequences_spills_nothing(
      self, halves, dim, length
  ):
    static = _FORWARD_TILES | dict(HALVES=halves, D=dim, T=length)
    compiled = _compile(triton_sequences.forward, 90, 4, 3, static)
    registers, stack = _usage(compiled)
    self.assertLessEqual(registers, 184)
    self.assertEqual(stack, 0)
    self.assertLessEqual(compiled.metadata.shared, 75 << 10)
    self.assert_attends_alike(compiled)

  @parameterized.parameters(*_LONG_SEQUENCES)
  def test_attention_of_long_sequences_spills_addresses_only(self, **static):
    compiled = _compile(triton_sequences.forward, 90, 4, 3, static)
    _, stack = _usage(compiled)
    self.assertLessEqual(stack, 64)
    self.assertLessEqual(compiled.metadata.shared, 113 << 10)
    self.assert_attends_alike(compiled)

  @parameterized.parameters(*_GRADIENTS)
  def test_gradients_of_attention_spill_nothing(self, kernel, static, stages):
    compiled = _compile(kernel, 90, 4, stages, static)
    _, stack = _usage(compiled)
    self.assertEqual(stack, 0)
    self.assertLessEqual(compiled.metadata.shared, 113 << 10)
    loops, writes = _early_writes(compiled.asm['ptx'])
    self.assertEqual((loops, writes), (1, []))
    self.assertNotIn('mma.sync', compiled.asm['ptx'])

  def assert_attends_alike(self, compiled):
    """Checks instructions of the tensor cores, and how operands get there."""
    ptx = compiled.asm['ptx']
    self.assertEqual(
        set(re.findall(r'wgmma\.mma_async\S*', ptx)),
        {
            f'wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16'
            for n in (32, 64)
        },
    )
    loops, writes = _early_writes(ptx)
    self.assertGreaterEqual(loops, 2)
    self.assertEmpty(writes)
    # Keys and values are loaded ahead.
    widths = re.findall(r'cp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], (\w+)', ptx)
    self.assertEqual(set(widths), {'0x10'})
    self.assertNotRegex(ptx, r'ld\.global\.b(8|16)')

  @parameterized.product(static=(_ROWS, _FOUR), capability=(90, 100, 120))
  def test_quantizer_arithmetic_is_exact(self, static, capability):
    kernel = triton_quantize.nvfp4_rows
    ptx = _compile(kernel, capability, 4, 3, static).asm['ptx']
    # Correctly rounded, subnormals kept, nothing contracted.
    self.assertIn('div.rn.f32', ptx)
    self.assertNotRegex(ptx, r'div\.(approx|full)|rcp\.approx|\.ftz')
    self.assertIn('ld.global.v4', ptx)
    self.assertIn('cvt.rn.satfinite.e4m3x2.f32', ptx)

  def test_quantizer_reads_x_once_in_16_byte_loads(self):
    ptx = _compile(triton_quantize.nvfp4_rows, 90, 4, 3, _ROWS).asm['ptx']
    loads = re.findall(r'ld\.global\S*', ptx)
    # 4096 bfloat16 of 128 threads.
    self.assertEqual(loads, ['ld.global.v4.b32'] * 4)

  @parameterized.parameters(
      (triton_few.nvfp4_few, _NVFP4_FEW, 4),
      (triton_few.nvfp4_few, _NVFP4_FEW | dict(ROWS=128), 4),
      (triton_matmul.bfloat16_matmul, _MANY, 8),
  )
  def test_hopper_matmul_takes_the_same_steps(self, kernel, static, warps):
    compiled = _compile(kernel, 90, warps, 3, static)
    instructions = set(re.findall(r'wgmma\.mma_async\S*', compiled.asm['ptx']))
    rows = static['ROWS']
    self.assertEqual(
        instructions,
        {f'wgmma.mma_async.sync.aligned.m64n{rows}k16.f32.bf16.bf16'},
    )
    # Weights go from registers to the tensor cores, without a change of layout
    # in between: the only one is that of the result, of each weight.
    changes = re.findall(
        r'ttg\.convert_layout.*tensor<\d+x\d+x', compiled.asm['ttgir']
    )
    self.assertLessEqual(len(changes), 3 if 'N2' in static else 1)

  @parameterized.parameters(*_GROUPED)
  def test_grouped_matmul_takes_the_same_steps(self, kernel, static, warps, _):
    compiled = _compile(kernel, 90, warps, 3, static)
    ptx = compiled.asm['ptx']
    if 'ROWS' in static:  # and half as many, for what is left of a group
      columns = {static['ROWS'], max(static['ROWS'] // 2, 16)}
    else:
      columns = {static['COLUMNS']}
    self.assertEqual(
        set(re.findall(r'wgmma\.mma_async\S*', ptx)),
        {
            f'wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16'
            for n in columns
        },
    )
    # Only the results change their layout.
    changes = compiled.asm['ttgir'].count('ttg.convert_layout')
    self.assertLessEqual(changes, len(columns))
    # Operands are loaded ahead, 16 bytes a thread, by cp.async.cg; block scales
    # of NVFP4, half a byte for each column of x, 4 bytes, by cp.async.ca.
    widths = re.findall(r'cp\.async\.c[ag]\S* \[[^]]*\], \[[^]]*\], (\w+)', ptx)
    narrow = {'0x4'} if kernel is triton_grouped.nvfp4_rows else set()
    self.assertEqual(set(widths), {'0x10'} | narrow)
    self.assertNotRegex(ptx, r'ld\.global\.b(8|16)')

  @parameterized.product(
      kernel=(
          (triton_grouped.nvfp4_rows, _EXPERTS),
          (triton_few.nvfp4_few, _NVFP4_FEW),
      ),
      rows=(16, 32, 64, 128),
      features_and_warps=((64, 4), (128, 8)),
  )
  def test_decoded_weights_stay_until_they_are_read(
      self, kernel, rows, features_and_warps
  ):
    kernel, static = kernel
    features, warps = features_and_warps
    static = static | dict(ROWS=rows, FEATURES=features)
    loops, writes = _early_writes(
        _compile(kernel, 90, warps, 3, static).asm['ptx']
    )
    self.assertGreater(loops, 0)
    self.assertEmpty(writes)

  @parameterized.parameters(
      (100, _NVFP4, r'tcgen05\.mma\S*kind::mxf4nvf4\.block_scale\S*4X'),
      (100, _MXFP8, r'tcgen05\.mma\S*kind::mxf8f6f4\.block_scale'),
      (120, _NVFP4, r'mma\.sync\S*kind::mxf4nvf4\.block_scale\S*ue4m3'),
      (120, _MXFP8, r'mma\.sync\S*kind::mxf8f6f4\.block_scale\S*ue8m0'),
  )
  def test_blackwell_uses_block_scaled_instructions(self, sm, static, wanted):
    kernel = triton_blackwell.block_scaled_matmul
    ptx = _compile(kernel, sm, 4, 3, static, '*u8').asm['ptx']
    self.assertRegex(ptx, wanted)
    self.assertIn(f'.target sm_{sm}a', ptx)

  @parameterized.parameters(
      quantization.QuantSpec('nvfp4', 'token'),
      quantization.QuantSpec('nvfp4', block_2d=True, four_over_six='mse'),
      quantization.QuantSpec('mxfp8'),
  )
  def test_quantizer_lowers_once_under_jit_vmap_and_a_vjp(self, spec):
    quantize = functools.partial(triton_quantize.quantize, spec=spec)
    x = jax.ShapeDtypeStruct((3, 64, 4096), jnp.bfloat16)

    @jax.custom_vjp
    def layer(x):
      return _forward(x)[0]

    def _forward(x):
      q = quantize(x.astype(jnp.bfloat16))
      return jnp.sum(q.data.astype(jnp.float32)), q

    layer.defvjp(_forward, lambda q, dy: (dy * q.data[..., :1] + 0 * dy,))
    for fn in (quantize, jax.vmap(quantize), jax.vmap(layer)):
      self.assertEqual(_calls(fn, x), 1)

  def test_matmul_lowers(self):
    spec = quantization.QuantSpec('nvfp4')
    w = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
    wq = jax.eval_shape(lambda w: quantization.quantize(w, spec), w)
    for m in (1, 16, 512):
      x = jax.ShapeDtypeStruct((m, 1024), jnp.bfloat16)
      decoders = int(m > 128)  # of w
      calls = _calls(triton_matmul.scaled_matmul, x, wq)
      self.assertEqual(calls, 1 + decoders)
      xq = jax.eval_shape(lambda x: quantization.quantize(x, spec), x)
      calls = _calls(triton_matmul.scaled_matmul, xq, wq)
      self.assertEqual(calls, 2 + decoders)

  @parameterized.parameters((128, 4), (4096, 4), (4096, 128))
  def test_grouped_matmul_lowers(self, rows, groups):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    x, dy, w = of(rows, 128), of(rows, 192), of(groups, 192, 128)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    module = triton_grouped
    self.assertEqual(_calls(module.matmul, x, w, sizes), 1)
    self.assertEqual(_calls(module.dgrad, dy, w, sizes), 1)
    self.assertEqual(_calls(module.wgrad, dy, x, sizes), 1)
    spec = quantization.QuantSpec('nvfp4')
    xq, wq = (
        jax.eval_shape(lambda a: quantization.quantize(a, spec), a)
        for a in (x, w)
    )
    self.assertEqual(
        _calls(module.scaled_matmul, xq, wq, sizes), 2
    )  # decodes x
    self.assertEqual(_calls(module.scaled_matmul, x, wq, sizes), 1)

  @parameterized.parameters(
      (dict(), None),
      (dict(capability=10.0), 'for compute capability 9.0, not 10.0'),
      (dict(dtype=jnp.float32), 'not all bfloat16'),
      (dict(dim=32), 'head_dim 32 is not one of'),
      (dict(block=32), 'the block of 32 keys'),
      (dict(length=40_000), '40000 positions'),
      (dict(length=0), 'is empty'),
      (dict(heads=3), '3 query heads do not share 2 key heads'),
      (dict(heads=1 << 16, length=1 << 10), 'wider indices'),
      (dict(keys=4), r'are not \(2, 2, 5, 64\)'),
  )
  def test_what_attention_of_sequences_cannot_do(self, changed, problem):
    given = dict(length=5, dim=64, heads=4, keys=None)
    given |= dict(dtype=jnp.bfloat16, block=64, capability=9.0)
    length, dim, heads, keys, dtype, *rest = (given | changed).values()
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    q, kv = of(2, length, heads, dim), of(2, 2, keys or length, dim)
    found = triton_sequences.unsupported(q, kv, kv, *rest)
    self.assertRegex(str(found), str(problem))

  def test_attention_of_sequences_lowers(self):
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    q, kv = of(3, 2, 300, 4, 64), of(3, 2, 2, 300, 64)
    attend = functools.partial(triton_sequences.attention, block=64)

    def loss(*operands):
      y = jax.checkpoint(attend)(*operands)
      return jnp.sum(y.astype(jnp.float32) ** 2)

    # Every shape says along which axes of a mesh it varies.
    mesh = jax.make_mesh((1,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec('x')
    gradient = jax.vmap(jax.grad(loss, (0, 1, 2)))
    shared = jax.shard_map(gradient, mesh=mesh, in_specs=spec, out_specs=spec)
    with mock.patch.object(triton_call, '_capability', lambda: 90):
      jax.eval_shape(shared, q, kv, kv)
    self.assertEqual(_calls(jax.vmap(attend), q, kv, kv), 1)
    self.assertEqual(_calls(gradient, q, kv, kv), 4)

  def test_blackwell_matmul_lowers(self):
    for spec in (quantization.QuantSpec(f) for f in ('nvfp4', 'mxfp8')):
      w = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16)
      q = jax.eval_shape(lambda w, s=spec: quantization.quantize(w, s), w)
      self.assertEqual(_calls(triton_blackwell.scaled_matmul, q, q, sm=100), 1)


def _calls(fn, *args, sm=90):
  """Returns how many Triton kernels `fn` calls, lowered for a CUDA device."""
  with mock.patch.object(triton_call, '_capability', lambda: sm):
    lowered = jax.jit(fn).trace(*args).lower(lowering_platforms=('cuda',))
  return lowered.as_text().count('stablehlo.custom_call @__gpu$xla.gpu.ptx')


if __name__ == '__main__':
  absltest.main()
