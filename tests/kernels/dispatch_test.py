"""Which implementation of a kernel runs, and what says so."""

import contextlib
import types
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import kernels
from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import matmul
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax.kernels import choice
from nvfp4_jax.kernels import reference
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from tests.kernels import sequence_cases

_TOKEN = quantization.QuantSpec('nvfp4', 'token')
_WEIGHT = quantization.QuantSpec('nvfp4')
_STOCHASTIC = quantization.QuantSpec('nvfp4', rounding='stochastic')
_UNQUANTIZED = (kernels.matmul, kernels.dgrad, kernels.wgrad)
_GROUPED = ('scaled_matmul', 'matmul', 'dgrad', 'wgrad')


def _x():
  return jax.random.normal(jax.random.key(0), (4, 64), jnp.bfloat16)


def _on_gpu(problem=None, devices=1):
  """Returns a context with Triton kernels that can run, and their stand-in."""
  module = types.SimpleNamespace(
      unsupported=mock.Mock(return_value=problem),
      quantize=mock.Mock(return_value='bytes'),
  )
  context = mock.patch.multiple(
      choice,
      cannot_run_triton=lambda: None,
      triton_quantize=lambda: module,
  )
  count = mock.patch.object(jax, 'device_count', lambda: devices)
  return context, count, module


@contextlib.contextmanager
def _hopper_with(module, *names, devices=1):
  """A context of Hopper GPUs where such modules are a stand-in."""
  modules = dict.fromkeys(names, lambda: module)
  hopper = mock.patch.multiple(
      choice,
      cannot_run_triton=lambda: None,
      compute_capability=lambda: 9.0,
      **modules,
  )
  with hopper, mock.patch.object(jax, 'device_count', lambda: devices):
    yield


@contextlib.contextmanager
def _on_hopper(problem=None, devices=1):
  """A context with matmuls in Triton, and their stand-in."""

  def stand_in(name):
    def multiply(x, w, sizes=None, *, tile=None, dtype=None):
      del tile, dtype
      w = w.take() if isinstance(w, qtensor.Layer) else w
      return getattr(reference, name)(x, w, sizes)

    return mock.Mock(side_effect=multiply)

  module = types.SimpleNamespace(
      WHY_NOT_CHOSEN=None,
      MOST_NVFP4_ROWS=128,
      matmuls=mock.Mock(
          side_effect=lambda x, ws, **_: tuple(f'y{i}' for i in range(len(ws)))
      ),
      unsupported=mock.Mock(return_value=problem),
      unsupported_bfloat16=mock.Mock(return_value=problem),
      **{name: stand_in(name) for name in _GROUPED},
  )
  hopper = _hopper_with(
      module, 'triton_few', 'triton_grouped', 'triton_matmul', devices=devices
  )
  references = mock.patch.multiple(
      kernels,
      quantize=quantization.quantize,
      decode=qtensor.decode,
      dequantize=qtensor.dequantize,
  )
  with hopper, references:
    yield module


def _experts():
  return jax.random.normal(jax.random.key(1), (2, 64, 64), jnp.bfloat16)


def _grouped(name):
  """Returns a function of `kernels`, its operands and sizes of groups."""
  operand = {
      'scaled_matmul': quantization.quantize(_experts(), _WEIGHT),
      'wgrad': _x(),
  }.get(name, _experts())
  return getattr(kernels, name), (_x(), operand, jnp.array([1, 3], jnp.int32))


class DispatchTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    choice.log_once.cache_clear()

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
        choice, cannot_run_triton=lambda: None, triton_grouped=lambda: module
    ):
      if name != 'matmul':
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
        choice, cannot_run_triton=lambda: None, triton_grouped=lambda: module
    ):
      sizes = jnp.array([4])
      y = kernels.scaled_matmul(_x(), wq, sizes, implementation='triton')
    self.assertEqual(y, 'y')
    self.assertIs(module.scaled_matmul.call_args.args[2], sizes)

  @parameterized.parameters(*_GROUPED)
  def test_grouped_triton_is_chosen_and_logged_once(self, name):
    function, operands = _grouped(name)
    with _on_hopper() as module:
      with self.assertLogs(kernels.__name__, 'INFO') as logs:
        for _ in range(2):
          function(*operands)
      self.assertEqual(getattr(module, name).call_count, 2)
      self.assertLen(logs.output, 1)
      self.assertIn(f"{name}: implementation 'triton'", logs.output[0])
      function(*operands, implementation='reference')
    self.assertEqual(getattr(module, name).call_count, 2)

  @parameterized.product(
      name=_GROUPED, where=({'problem': 'it is too hard'}, {'devices': 8})
  )
  def test_grouped_reference_is_chosen_where_triton_cannot(self, name, where):
    function, operands = _grouped(name)
    with _on_hopper(**where) as module:
      with self.assertLogs(kernels.__name__, 'INFO') as logs:
        y = function(*operands)
      want = function(*operands, implementation='reference')
    chex.assert_trees_all_equal(y, want)
    getattr(module, name).assert_not_called()
    reason = where.get('problem', 'several devices')
    self.assertRegex(logs.output[0], f"{name}: .*'reference', since .*{reason}")

  @parameterized.parameters(kernels.dgrad, kernels.wgrad)
  def test_without_groups_none_is_the_reference(self, function):
    with _on_hopper() as module, self.assertNoLogs(kernels.__name__, 'INFO'):
      function(_x().T @ _x(), _x().T @ _x())
    module.unsupported_bfloat16.assert_not_called()

  def test_few_rows_have_kernels_of_their_own(self):
    layers = [qtensor.Layer(_experts(), jnp.int32(i)) for i in range(2)]
    quantized = [
        qtensor.Layer(quantization.quantize(w.stack, _WEIGHT), w.index)
        for w in layers
    ]
    with _on_hopper() as module:
      (y,) = kernels.matmuls(_x(), layers[:1])
      self.assertEqual(kernels.matmul(_x(), layers[0].take()), 'y0')
      self.assertEqual(kernels.matmuls(_x(), layers), ('y0', 'y1'))
      self.assertEqual(kernels.matmuls(_x(), quantized), ('y0', 'y1'))
      self.assertEqual(module.matmuls.call_count, 4)
      mixed = kernels.matmuls(_x(), (layers[0], quantized[1]))
    self.assertEqual(y, 'y0')
    self.assertEqual(mixed[0], 'y0')  # one by one
    with _on_hopper('there are too many rows'):
      for ws in (layers, quantized, (layers[0], quantized[1])):
        ys = kernels.matmuls(_x(), ws, dtype=jnp.bfloat16)
        for y, w in zip(ys, ws, strict=True):
          function = kernels.matmul
          if isinstance(w.stack, qtensor.QTensor):
            function = kernels.scaled_matmul
          want = function(_x(), w.take(), dtype=jnp.bfloat16)
          np.testing.assert_array_equal(y, want)
      with self.assertRaisesRegex(NotImplementedError, 'matmul.*too many'):
        kernels.matmul(_x(), _x(), implementation='triton')

  def test_layers_of_experts_are_read_in_their_stack(self):
    stack = quantization.quantize(
        jnp.stack([_experts(), 2 * _experts()]), _WEIGHT
    )
    layer = qtensor.Layer(stack, jnp.int32(1))
    precision = matmul.MatmulPrecision(_TOKEN, _WEIGHT)
    sizes = jnp.array([1, 3], jnp.int32)
    multiply = lambda wq: matmul.quantized_grouped_matmul(
        _x(), None, sizes, precision, wq=wq
    )
    self.assertFalse(kernels.reads_layers(stack))
    with _on_hopper('it is too hard'):
      self.assertFalse(kernels.reads_layers(stack))
      taken = multiply(layer)
    with _on_hopper(devices=8):
      self.assertFalse(kernels.reads_layers(stack))
    with _on_hopper() as module:
      self.assertTrue(kernels.reads_layers(stack))
      x, w, groups, _ = module.unsupported.call_args.args
      self.assertEqual((x.shape, w.data.shape), ((1, 64), (2, 64, 32)))
      self.assertEqual(groups.shape, (2,))
      read, given = multiply(layer), multiply(layer.take())
      seen = [call.args[1] for call in module.scaled_matmul.call_args_list]
      deeper = jax.tree.map(lambda leaf: leaf[None], stack)
      self.assertFalse(kernels.reads_layers(deeper))
    self.assertIsInstance(seen[0], qtensor.Layer)
    self.assertIsInstance(seen[1], qtensor.QTensor)
    chex.assert_trees_all_equal(read, given, taken)

  @parameterized.parameters(None, 'high_precision', 'dequantized')
  def test_gradients_of_grouped_matmuls_are_triton_too(self, backward):
    sizes = jnp.array([[1, 3], [4, 0], [0, 2]], jnp.int32)

    def loss(x, w, sizes):
      if backward is None:
        return jnp.sum(matmul.unquantized_matmul(x, w, sizes) ** 2)
      precision = matmul.MatmulPrecision(_TOKEN, _WEIGHT, backward=backward)
      y = matmul.quantized_grouped_matmul(x, w, sizes, precision)
      return jnp.sum(y**2)

    # Under vmap as in sweeps, whose lanes are whole runs.
    gradient = jax.vmap(jax.grad(loss, (0, 1)), (None, None, 0))
    args = (_x(), _experts(), sizes)
    want = gradient(*args)
    with _on_hopper() as module:
      got = gradient(*args)
    chex.assert_trees_all_equal(got, want)
    module.dgrad.assert_called_once()
    module.wgrad.assert_called_once()

  def test_attention_of_sequences_is_not_that_of_a_token(self):
    config = model_config.tiny(16)
    params = transformer.init_params(jax.random.key(0), config)
    params = transformer.stack(params, (config.num_layers,))
    quantizer = policy.Quantizer(recipes.get('bf16').learner)
    tokens = jnp.arange(10).reshape(2, 5)
    module = types.SimpleNamespace(
        unsupported=mock.Mock(return_value=None),
        attention=mock.Mock(side_effect=sequence_cases.reference),
    )
    hopper = mock.patch.multiple(
        kernels.sequences.choice,
        is_triton=lambda name, *_: name == 'attention',
        triton_sequences=lambda: module,
    )
    run = lambda: transformer.forward(config, params, tokens, quantizer)
    want = run()
    with hopper:
      np.testing.assert_array_equal(run(), want)
      self.assertEqual(module.attention.call_count, 1)  # in a scan
      cache = kv_cache.init(
          config.num_layers, 2, config.num_kv_heads, 16, config.head_dim
      )
      params = policy.quantize_params(quantizer, params)
      lengths = jnp.array([5, 5])
      _, cache, _ = transformer.prefill(
          config, params, tokens, lengths, quantizer, cache
      )
      self.assertEqual(module.attention.call_count, 2)
      transformer.decode_step(
          config, params, tokens[:, 0], quantizer, cache, 16
      )
      self.assertEqual(module.attention.call_count, 2)

  def test_attention_of_sequences_is_triton_where_it_can(self):
    q = jnp.ones((2, 5, 4, 64), jnp.bfloat16)
    k = jnp.ones((2, 2, 5, 64), jnp.bfloat16)
    for problem in (None, 'it is too long'):
      module = types.SimpleNamespace(
          unsupported=mock.Mock(return_value=problem),
          attention=mock.Mock(return_value='y'),
      )
      with _hopper_with(module, 'triton_sequences'):
        with self.assertLogs(kernels.__name__, 'INFO') as logs:
          chosen = kernels.sequences.attends(q, k, k, 64)
        if problem is None:
          self.assertEqual(kernels.sequences.attention(q, k, k, 64), 'y')
        else:
          with self.assertRaisesRegex(NotImplementedError, problem):
            kernels.sequences.attention(q, k, k, 64)
      self.assertEqual(chosen, problem is None)
      self.assertRegex(logs.output[0], problem or "attention: .*'triton'")
      module.unsupported.assert_called_with(q, k, k, 64, 9.0)

  def test_swiglu_is_one_kernel_where_it_can_be(self):
    x, stack = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((3, 32, 64))
    plain = qtensor.Layer(stack.astype(jnp.bfloat16), jnp.int32(1))
    other = qtensor.Layer(plain.stack[:, :16], jnp.int32(1))
    quantized = qtensor.Layer(
        quantization.quantize(plain.stack, _TOKEN), jnp.int32(1)
    )
    for up, problem in (
        (plain, None),
        (plain, 'too many'),
        (other, 'not like up'),
        (quantized, 'quantized'),
    ):
      said = problem if up is plain else None
      module = types.SimpleNamespace(
          unsupported_bfloat16=mock.Mock(return_value=said),
          swiglu=mock.Mock(return_value='y'),
      )
      with _hopper_with(module, 'triton_few'):
        chosen = kernels.decoding.projects_swiglu(x, plain, up)
        if problem is None:
          self.assertEqual(kernels.decoding.swiglu(x, plain, up), 'y')
        else:
          with self.assertRaisesRegex(NotImplementedError, problem):
            kernels.decoding.swiglu(x, plain, up)
      self.assertEqual(chosen, problem is None)

  @parameterized.parameters('bias', 'taps', 'slice', None)
  def test_swiglu_of_what_no_kernel_computes(self, changed):
    w = jnp.ones((3, 64, 64), jnp.bfloat16)
    names = [f'mlp.{name}_proj' for name in ('gate', 'up', 'down')]
    params = {name: qtensor.Layer(w, jnp.int32(1)) for name in names}
    if changed == 'bias':
      params['mlp.up_proj.bias'] = jnp.ones((64,), jnp.bfloat16)
    if changed == 'slice':
      params['mlp.up_proj'] = w[1]
    taps = {} if changed == 'taps' else None
    precisions = dict.fromkeys(names)
    weights = layers.LayerWeights(params, {}, precisions, taps=taps)
    asks = mock.Mock(return_value=False)
    with mock.patch.object(kernels.decoding, 'projects_swiglu', asks):
      layers.mlp(jnp.ones((2, 64), jnp.bfloat16), weights, 'mlp')
    self.assertEqual(asks.called, changed is None)

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
