"""Which implementation of a kernel runs, and what says so."""

import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp

from nvfp4_jax import kernels
from nvfp4_jax import matmul
from nvfp4_jax import qtensor
from nvfp4_jax import quantization

_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_STOCHASTIC = quantization.QuantSpec('nvfp4', rounding='stochastic')
_UNQUANTIZED = (kernels.matmul, kernels.dgrad, kernels.wgrad)


def _x():
  return jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)


def _on_gpu(problem=None, devices=1):
  """Returns a context with Triton kernels that can run, and their stand-in."""
  module = types.SimpleNamespace(
      unsupported=mock.Mock(return_value=problem),
      quantize=mock.Mock(return_value='bytes'),
  )
  context = mock.patch.multiple(
      kernels,
      _cannot_run_triton=lambda: None,
      _triton_quantize=lambda: module,
  )
  count = mock.patch.object(jax, 'device_count', lambda: devices)
  return context, count, module


class DispatchTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    kernels._log_once.cache_clear()

  @parameterized.parameters(None, 'reference')
  def test_reference_is_the_definition(self, implementation):
    q = kernels.quantize(_x(), _TOKEN, implementation=implementation)
    chex.assert_trees_all_equal(q, quantization.quantize(_x(), _TOKEN))

  def test_triton_without_a_gpu_raises_and_says_why(self):
    if jax.default_backend() != 'cpu':
      self.skipTest('This machine has a GPU.')
    wq = quantization.quantize(_x(), quantization.QuantSpec('nvfp4'))
    with self.assertRaisesRegex(NotImplementedError, 'backend is cpu'):
      kernels.quantize(_x(), _TOKEN, implementation='triton')
    with self.assertRaisesRegex(NotImplementedError, 'backend is cpu'):
      kernels.scaled_matmul(_x(), wq, implementation='triton')
    for function in _UNQUANTIZED:
      with self.assertRaisesRegex(NotImplementedError, 'backend is cpu'):
        function(_x(), _x(), jnp.array([4]), implementation='triton')

  def test_unknown_implementation_raises_with_the_known_ones(self):
    wq = quantization.quantize(_x(), quantization.QuantSpec('nvfp4'))
    for call in (
        lambda name: kernels.quantize(_x(), _TOKEN, implementation=name),
        lambda name: kernels.scaled_matmul(_x(), wq, implementation=name),
        *[
            lambda name, fn=fn: fn(_x(), _x(), implementation=name)
            for fn in _UNQUANTIZED
        ],
    ):
      with self.assertRaisesRegex(ValueError, "'cuda'.*'reference', 'triton'"):
        call('cuda')

  def test_layer_of_a_stack_is_taken_by_the_reference(self):
    w = jnp.stack([_x(), 2 * _x()])
    wq = quantization.quantize(w, quantization.QuantSpec('nvfp4'))
    layer = qtensor.Layer(wq, jnp.int32(1))
    got = kernels.scaled_matmul(_x(), layer, implementation='reference')
    want = kernels.scaled_matmul(_x(), layer.take(), implementation='reference')
    chex.assert_trees_all_equal(got, want)
    precision = matmul.MatmulPrecision(_TOKEN, quantization.QuantSpec('nvfp4'))
    y = matmul.quantized_matmul(_x(), None, precision, wq=layer)
    self.assertEqual(y.shape, (4, 4))
    with self.assertRaisesRegex(ValueError, 'w must be None'):
      matmul.quantized_matmul(_x(), _x(), precision, wq=layer)

  def test_result_is_float32_or_bfloat16(self):
    wq = quantization.quantize(_x(), quantization.QuantSpec('nvfp4'))
    with self.assertRaisesRegex(ValueError, 'float16 is not float32 or'):
      kernels.scaled_matmul(_x(), wq, dtype='float16')

  def test_tile_is_of_triton_only(self):
    wq = quantization.quantize(_x(), quantization.QuantSpec('nvfp4'))
    with self.assertRaisesRegex(ValueError, 'tile'):
      kernels.quantize(_x(), _TOKEN, tile=(1, 64, 4))
    with self.assertRaisesRegex(ValueError, 'tile'):
      kernels.scaled_matmul(_x(), wq, tile=(16, 64, 4, 4))
    for function in _UNQUANTIZED:
      with self.assertRaisesRegex(ValueError, 'tile'):
        function(_x(), _x(), tile=(16, 64, 4, 4))

  @parameterized.parameters('matmul', 'dgrad', 'wgrad')
  def test_unquantized_matmuls_with_groups_can_be_triton(self, name):
    function = getattr(kernels, name)
    module = types.SimpleNamespace(
        unsupported_bfloat16=mock.Mock(side_effect=[None, 'it is too hard'])
    )
    setattr(module, name, mock.Mock(return_value='y'))
    x, sizes = _x(), jnp.array([4])
    with mock.patch.multiple(
        kernels, _cannot_run_triton=lambda: None, _triton_grouped=lambda: module
    ):
      with self.assertRaisesRegex(
          NotImplementedError, f'{name}: .*groups only'
      ):
        function(x, x, implementation='triton')
      tile = (16, 64, 4, 4)
      y = function(x, x, sizes, implementation='triton', tile=tile)
      self.assertEqual(y, 'y')
      with self.assertRaisesRegex(NotImplementedError, f'{name}: it is too'):
        function(x, x, sizes, implementation='triton')
    getattr(module, name).assert_called_once_with(x, x, sizes, tile=tile)

  def test_scaled_matmul_with_groups_has_kernels_of_its_own(self):
    module = types.SimpleNamespace(
        unsupported=mock.Mock(return_value=None),
        scaled_matmul=mock.Mock(return_value='y'),
    )
    wq = quantization.quantize(_x()[None], quantization.QuantSpec('nvfp4'))
    with mock.patch.multiple(
        kernels, _cannot_run_triton=lambda: None, _triton_grouped=lambda: module
    ):
      sizes = jnp.array([4])
      y = kernels.scaled_matmul(_x(), wq, sizes, implementation='triton')
    self.assertEqual(y, 'y')
    self.assertIs(module.scaled_matmul.call_args.args[2], sizes)

  def test_triton_is_chosen_where_it_can_run(self):
    context, count, module = _on_gpu()
    with context, count:
      self.assertEqual(kernels.quantize(_x(), _TOKEN), 'bytes')
    module.quantize.assert_called_once()

  def test_what_triton_cannot_do_falls_back_only_if_nothing_was_named(self):
    context, count, module = _on_gpu('it is too hard')
    with context, count:
      q = kernels.quantize(_x(), _TOKEN)
      with self.assertRaisesRegex(NotImplementedError, 'it is too hard'):
        kernels.quantize(_x(), _TOKEN, implementation='triton')
    chex.assert_trees_all_equal(q, quantization.quantize(_x(), _TOKEN))
    module.quantize.assert_not_called()

  def test_several_devices_use_triton_in_a_shard_map_only(self):
    context, count, module = _on_gpu(devices=8)
    with context, count:
      kernels.quantize(_x(), _TOKEN)
      module.quantize.assert_not_called()
      named = kernels.quantize(_x(), _TOKEN, implementation='triton')
      self.assertEqual(named, 'bytes')
      mesh = jax.make_mesh((1,), ('data',))
      seen = []

      def body(x):
        seen.append(kernels.quantize(x, _TOKEN))
        return x

      spec = jax.sharding.PartitionSpec()
      jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec)(_x())
    self.assertEqual(seen, ['bytes'])

  def test_operands_are_checked_before_triton_sees_them(self):
    context, count, module = _on_gpu()
    with context, count:
      with self.assertRaisesRegex(ValueError, 'not a multiple of 16'):
        kernels.quantize(_x()[:, :17], _TOKEN)
      with self.assertRaisesRegex(ValueError, 'needs a key'):
        kernels.quantize(_x(), _STOCHASTIC)
    module.quantize.assert_not_called()

  def test_choice_is_logged_once(self):
    with self.assertLogs(kernels.__name__, 'INFO') as logs:
      for _ in range(3):
        kernels.quantize(_x(), _TOKEN)
    self.assertLen(logs.output, 1)
    self.assertIn("quantize: implementation 'reference'", logs.output[0])


if __name__ == '__main__':
  absltest.main()
