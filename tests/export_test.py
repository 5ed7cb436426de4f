"""Conversion, live export and what is read back: equal bytes everywhere."""

import dataclasses
import json
import pathlib
import tempfile
import tracemalloc

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nvfp4_jax import export
from nvfp4_jax import files
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import quantization
from nvfp4_jax import recipes
from nvfp4_jax import safetensors
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import hf
from nvfp4_jax.models import hf_config
from nvfp4_jax.models import transformer

# ArrowsTest of bit_exact_test.py has the bytes of optimized programs.
pytestmark = pytest.mark.quick_compile

GOLDEN = pathlib.Path(__file__).parent / 'golden' / 'hf'
# Every family, and every format in every layout that can hold it.
CONVERSIONS = (
    ('llama', 'modelopt', 'nvfp4_final'),
    ('qwen3', 'modelopt', 'mxfp8_dequantized'),
    ('qwen3_moe', 'modelopt', 'nvfp4_high_precision'),
    ('qwen3_moe_fused', 'compressed_tensors', 'nvfp4_high_precision'),
    ('glm4_moe', 'modelopt', 'nvfp4_final'),
    ('glm4_moe', 'compressed_tensors', 'mxfp8'),
    ('glm4_moe', 'compressed_tensors', 'fp8_block'),
    ('glm4_moe', 'deepseek', 'fp8_block'),
)


def target(recipe, layout='modelopt', **options):
  precision_policy = recipes.get(recipe).sampler
  return export.Target(precision_policy, layout, recipe, **options)


def running_tree(folder, recipe):
  """Returns the model of a folder and what its sampler runs, per layer."""
  config, params = hf.load(folder)
  precision_policy = recipes.get(recipe).sampler
  segments = policy.segments(
      [precision_policy], transformer.param_paths(config)
  )
  stacked = transformer.stack(params, segments)
  return config, policy.quantize_params(
      policy.Quantizer(precision_policy), stacked
  )


def random_params(config, seed):
  """Returns bfloat16 parameters, stacked in one segment."""
  rng = np.random.default_rng(seed)
  params = jax.tree.map(
      lambda spec: rng.normal(size=spec.shape).astype(jnp.bfloat16),
      transformer.param_specs(config),
      is_leaf=lambda leaf: isinstance(leaf, transformer.ParamSpec),
  )
  return transformer.stack(params, (config.num_layers,))


def contents(folder):
  """Returns the bytes of all files of a folder."""
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def values(params):
  return jax.tree.map(np.asarray, policy.dequantize_params(params))


class ExportTest(chex.TestCase):

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name)

  @parameterized.parameters(*CONVERSIONS)
  def test_converted_weights_are_those_that_the_sampler_runs(
      self, family, layout, recipe
  ):
    export.convert(GOLDEN / family, self.folder / 'out', target(recipe, layout))
    _, want = running_tree(GOLDEN / family, recipe)
    _, got = hf.load(self.folder / 'out')
    chex.assert_trees_all_equal(got, transformer.unstack(want))
    self.assertTrue(
        any(
            isinstance(leaf, qtensor.QTensor)
            for leaf in got['layers'][1].values()
        )
    )

  def test_bf16_undoes_a_quantization(self):
    export.convert(GOLDEN / 'qwen3', self.folder / 'q', target('mxfp8'))
    export.convert(self.folder / 'q', self.folder / 'out', target('bf16'))
    _, quantized = hf.load(self.folder / 'q')
    _, got = hf.load(self.folder / 'out')
    want = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16).astype(np.float32), values(quantized)
    )
    chex.assert_trees_all_equal(values(got), want)
    raw = json.loads((self.folder / 'out/config.json').read_text())
    self.assertNotIn('quantization_config', raw)

  @parameterized.parameters('nvfp4_final', 'mxfp8_dequantized')
  def test_fp8_blocks_are_converted_by_way_of_bfloat16(self, recipe):
    source = self.folder / 'fp8'
    export.convert(
        GOLDEN / 'qwen3_moe', source, target('fp8_block', 'deepseek')
    )
    export.convert(source, self.folder / 'out', target(recipe))
    config, params = hf.load(source)
    masters = jax.tree.map(jnp.asarray, values(params))
    quantizer = policy.Quantizer(recipes.get(recipe).sampler)
    segments = policy.segments(
        [quantizer.policy], transformer.param_paths(config)
    )
    want = policy.quantize_params(
        quantizer, transformer.stack(masters, segments)
    )
    _, got = hf.load(self.folder / 'out')
    chex.assert_trees_all_equal(got, transformer.unstack(want))

  def test_quantized_weights_change_their_layout_byte_for_byte(self):
    recipe = 'nvfp4_final'
    folders = [self.folder / name for name in ('a', 'b', 'c')]
    export.convert(GOLDEN / 'glm4_moe', folders[0], target(recipe))
    for source, destination, layout in (
        (folders[0], folders[1], 'compressed_tensors'),
        (folders[1], folders[2], 'modelopt'),
    ):
      export.convert(source, destination, target(recipe, layout))
    trees = [hf.load(folder)[1] for folder in folders]
    chex.assert_trees_all_equal(*trees)
    self.assertEqual(*(contents(f)['model.safetensors'] for f in folders[::2]))

  def test_live_export_is_a_fresh_conversion_after_every_update(self):
    config = dataclasses.replace(
        model_config.tiny(32), num_layers=2, shared_expert_dim=0
    )
    recipe = 'nvfp4_high_precision'
    quantizer = policy.Quantizer(recipes.get(recipe).sampler)
    params = random_params(config, 0)
    for update in range(3):
      noise = random_params(config, 1 + update)
      params = jax.tree.map(lambda p, n: p + 0.01 * n, params, noise)
      before = jax.tree.map(np.array, params)
      live = self.folder / f'live{update}'
      tree = policy.quantize_params(quantizer, params)
      export.export(config, tree, live, target(recipe))
      chex.assert_trees_all_equal(params, before)

      source, fresh = self.folder / f'bf16_{update}', self.folder / f'n{update}'
      bf16 = policy.quantize_params(policy.Quantizer(policy.BF16), params)
      export.export(config, bf16, source, target('bf16'))
      export.convert(source, fresh, target(recipe))
      self.assertEqual(
          contents(live)['model.safetensors'],
          contents(fresh)['model.safetensors'],
      )

  def test_exported_logits_are_those_of_fake_quantized_masters(self):
    recipe = 'nvfp4_final'
    export.convert(GOLDEN / 'qwen3_moe', self.folder / 'out', target(recipe))
    config, params = hf.load(self.folder / 'out', dtype='float32')
    stacked = transformer.stack(
        policy.dequantize_params(params), (config.num_layers,)
    )
    _, tree = running_tree(GOLDEN / 'qwen3_moe', recipe)
    tokens = jnp.asarray(np.load(GOLDEN / 'qwen3_moe/reference.npz')['tokens'])
    bf16 = policy.Quantizer(policy.BF16)
    run = lambda p: transformer.logits(
        p, transformer.forward(config, p, tokens, bf16)
    )
    fake = policy.dequantize_params(tree)
    chex.assert_trees_all_equal(run(stacked), run(fake))

  def test_sharded_folder_holds_the_same_tensors(self):
    whole, shards = self.folder / 'whole', self.folder / 'shards'
    export.convert(GOLDEN / 'qwen3_moe', whole, target('nvfp4_final'))
    export.convert(
        GOLDEN / 'qwen3_moe', shards, target('nvfp4_final', shard_bytes=1)
    )
    self.assertLen(list(shards.glob('*.safetensors')), 4)
    chex.assert_trees_all_equal(hf.load(shards)[1], hf.load(whole)[1])
    index = json.loads((shards / safetensors.INDEX).read_text())
    infos = safetensors.read_index(shards)
    self.assertEqual(set(index['weight_map']), set(infos))
    total = sum(info.end - info.start for info in infos.values())
    self.assertEqual(index['metadata']['total_size'], total)


class GlobalScaleTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name)

  def _source(self, change):
    """Writes a folder with changed tensors and returns it."""
    source = self.folder / 'source'
    source.mkdir()
    raw = (GOLDEN / 'qwen3_moe/config.json').read_text()
    (source / 'config.json').write_text(raw)
    infos = safetensors.read_index(GOLDEN / 'qwen3_moe')
    tensors = {n: safetensors.read_tensor(i) for n, i in infos.items()}
    change(tensors)
    safetensors.write_file(source / safetensors.SINGLE, tensors)
    return source

  @parameterized.parameters(
      ('modelopt', 'weight_scale_2', 8 / 2688),
      ('compressed_tensors', 'weight_global_scale', 336.0),
  )
  def test_gate_and_up_of_an_expert_share_the_larger_amax(
      self, layout, suffix, want
  ):
    prefix = 'model.layers.0.mlp.experts.0.'

    def change(tensors):
      for name, amax in (('gate', 2.0), ('up', 8.0)):
        weight = tensors[f'{prefix}{name}_proj.weight']
        weight[:] = np.clip(weight, -1, 1)
        weight[3, 5] = amax

    source = self._source(change)
    export.convert(
        source, self.folder / 'out', target('nvfp4_high_precision', layout)
    )
    infos = safetensors.read_index(self.folder / 'out')
    gate, up = (
        safetensors.read_tensor(infos[f'{prefix}{name}_proj.{suffix}'])
        for name in ('gate', 'up')
    )
    self.assertEqual(gate.tobytes(), up.tobytes())
    self.assertEqual(np.float32(gate.item()), np.float32(want))

  def test_missing_partner_is_named(self):
    name = 'model.layers.1.mlp.experts.3.up_proj.weight'
    source = self._source(lambda tensors: tensors.pop(name))
    with self.assertRaisesRegex(files.CheckpointError, name):
      export.convert(source, self.folder / 'out', target('nvfp4_final'))
    self.assertFalse((self.folder / 'out').exists())

  @parameterized.parameters(
      ('modelopt', 'weight_scale_2', np.float32(1) / np.float32(448)),
      ('compressed_tensors', 'weight_global_scale', 448.0),
  )
  def test_row_of_a_half_and_six(self, layout, suffix, want):
    row = (
        jnp.zeros((1, 16), jnp.bfloat16)
        .at[0, :2]
        .set(jnp.array([0.5, 6], jnp.bfloat16))
    )
    spec = quantization.QuantSpec('nvfp4')
    tensors = export.layouts.encode(
        quantization.quantize(row, spec), layout, scale_max=spec.scale_max
    )
    codes, scale, *_ = tensors.values()
    self.assertEqual(codes[0, 0], 0x71)
    self.assertEqual(scale.view(np.uint8)[0, 0], 0x7E)
    self.assertEqual(tensors[suffix].item(), want)

  @parameterized.product(
      layout=('modelopt', 'compressed_tensors'),
      four_over_six=(None, 'mse'),
      one=(False, True),
  )
  def test_report_a1_zeros_have_finite_scales(self, layout, four_over_six, one):
    x = np.zeros((2, 32), jnp.bfloat16)
    x[0, 16] = float(one)
    spec = quantization.QuantSpec('nvfp4', four_over_six=four_over_six)
    q = quantization.quantize(x, spec)
    tensors = export.layouts.encode(q, layout, scale_max=spec.scale_max)
    _, scale, global_scale, *_ = tensors.values()
    self.assertTrue(np.all(np.isfinite(scale.astype(np.float32))))
    self.assertTrue(np.all(np.isfinite(global_scale)))
    self.assertGreater(global_scale.item(), 0)
    back = export.layouts.decode(tensors, layout, 'nvfp4', 'w')
    values = qtensor.dequantize(jax.tree.map(jnp.asarray, back), 'float32')
    np.testing.assert_array_equal(values, x.astype(np.float32))

  def test_encode_scale_is_that_of_the_quantizer(self):
    rng = np.random.default_rng(0)
    for spec in (
        quantization.QuantSpec('nvfp4'),
        quantization.QuantSpec('nvfp4', four_over_six='mse'),
    ):
      amax = (10 ** rng.uniform(-6, 3, 500)).astype(jnp.bfloat16)
      x = np.zeros((500, 1, 16), jnp.bfloat16)
      x[:, 0, 0] = amax
      q = quantization.quantize(jnp.asarray(x), spec)
      largest = np.float32(6 * spec.scale_max)
      for i, want in enumerate(largest / amax.astype(np.float32)):
        part = jax.tree.map(lambda leaf, i=i: leaf[i], q)
        tensors = export.layouts.encode(
            part, 'compressed_tensors', scale_max=spec.scale_max
        )
        got = tensors['weight_global_scale']
        self.assertEqual(got.item(), want)
        back = export.layouts.decode(
            tensors, 'compressed_tensors', 'nvfp4', 'w'
        )
        self.assertEqual(back.global_scale, np.asarray(part.global_scale))

  def test_swapped_conventions_are_refused(self):
    export.convert(
        GOLDEN / 'llama', self.folder / 'out', target('nvfp4_high_precision')
    )
    path = self.folder / 'out' / safetensors.SINGLE
    infos = safetensors.read_header(path)
    tensors = {n: safetensors.read_tensor(i) for n, i in infos.items()}
    name = 'model.layers.0.mlp.up_proj.weight_scale_2'
    tensors[name] = 1 / tensors[name]
    safetensors.write_file(path, tensors)
    with self.assertRaisesRegex(files.CheckpointError, 'layers.0.mlp.up_proj'):
      hf.load(self.folder / 'out', verify=False)


class InterruptedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name)

  def _interrupt(self, after, destination, wanted):
    def progress(done, total):
      del total
      if done == after:
        raise KeyboardInterrupt

    with self.assertRaises(KeyboardInterrupt):
      export.convert(
          GOLDEN / 'qwen3_moe', destination, wanted, progress=progress
      )
    self.assertFalse(destination.exists())

  @parameterized.parameters(1, 2, 3)
  def test_goes_on_and_ends_as_if_nothing_had_happened(self, after):
    wanted = target('nvfp4_final', shard_bytes=1)
    export.convert(GOLDEN / 'qwen3_moe', self.folder / 'whole', wanted)
    destination = self.folder / 'out'
    self._interrupt(after, destination, wanted)
    partial = self.folder / 'out.partial'
    with self.assertRaises(files.CheckpointError):
      hf.load(partial)
    leftover = partial / '.model-00004-of-00004.safetensors.1234.partial'
    leftover.write_bytes(b'cut short')
    kept = {p.name: p.stat().st_mtime_ns for p in partial.glob('model*')}
    self.assertNotEmpty(kept)
    export.convert(GOLDEN / 'qwen3_moe', destination, wanted)
    self.assertFalse(partial.exists())
    self.assertEqual(contents(destination), contents(self.folder / 'whole'))
    for name, time in kept.items():
      self.assertEqual((destination / name).stat().st_mtime_ns, time)

  def test_other_arguments_do_not_go_on(self):
    destination = self.folder / 'out'
    self._interrupt(2, destination, target('nvfp4_final', shard_bytes=1))
    with self.assertRaisesRegex(files.CheckpointError, 'other arguments'):
      export.convert(
          GOLDEN / 'qwen3_moe', destination, target('mxfp8', shard_bytes=1)
      )

  def test_strange_folder_in_the_way_is_kept(self):
    partial = self.folder / 'out.partial'
    partial.mkdir()
    (partial / 'notes.txt').write_text('mine')
    with self.assertRaisesRegex(files.CheckpointError, 'in the way'):
      export.convert(
          GOLDEN / 'llama', self.folder / 'out', target('nvfp4_final')
      )
    self.assertEqual((partial / 'notes.txt').read_text(), 'mine')

  def test_existing_destination_is_kept(self):
    (self.folder / 'out').mkdir()
    with self.assertRaises(FileExistsError):
      export.convert(
          GOLDEN / 'llama', self.folder / 'out', target('nvfp4_final')
      )


class RefusedTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    scratch = tempfile.TemporaryDirectory()
    self.addCleanup(scratch.cleanup)
    self.folder = pathlib.Path(scratch.name)

  @parameterized.parameters(
      ('deepseek', 'nvfp4_final', 'deepseek'),
      ('modelopt', 'nvfp4_naive', 'calibration'),
      ('modelopt', 'fp8_block', 'layers.0.self_attn.q_proj.*128'),
  )
  def test_layout_that_cannot_say_it(self, layout, recipe, message):
    with self.assertRaisesRegex(ValueError, message):
      export.convert(
          GOLDEN / 'llama', self.folder / 'out', target(recipe, layout)
      )
    self.assertEmpty(list(self.folder.iterdir()))

  def test_non_finite_weight_is_named(self):
    source = self.folder / 'source'
    source.mkdir()
    (source / 'config.json').write_text(
        (GOLDEN / 'llama/config.json').read_text()
    )
    infos = safetensors.read_index(GOLDEN / 'llama')
    tensors = {n: safetensors.read_tensor(i) for n, i in infos.items()}
    tensors['model.layers.1.mlp.down_proj.weight'][2, 3] = np.inf
    safetensors.write_file(source / safetensors.SINGLE, tensors)
    with self.assertRaisesRegex(
        policy.NonFiniteError, 'layers.1.mlp.down_proj'
    ):
      export.convert(
          source, self.folder / 'out', target('nvfp4_high_precision')
      )

  def test_tree_of_another_policy(self):
    config, tree = running_tree(GOLDEN / 'qwen3', 'nvfp4_high_precision')
    with self.assertRaisesRegex(ValueError, 'layers.0.*nvfp4.*mxfp8'):
      export.export(config, tree, self.folder / 'out', target('mxfp8'))


class FolderTest(chex.TestCase):

  def test_configuration_is_for_old_and_new_readers(self):
    with tempfile.TemporaryDirectory() as scratch:
      out = pathlib.Path(scratch) / 'out'
      export.convert(GOLDEN / 'qwen3_moe', out, target('nvfp4_final'))
      raw = json.loads((out / 'config.json').read_text())
      quant = json.loads((out / 'hf_quant_config.json').read_text())
      record = files.check_manifest(out)
      infos = safetensors.read_index(out)
      scale = safetensors.read_tensor(
          infos['model.layers.0.mlp.experts.5.down_proj.input_scale']
      )
    self.assertEqual(raw['num_experts'], raw['num_local_experts'])
    self.assertEqual(raw['dtype'], raw['torch_dtype'])
    self.assertEqual(raw['rope_theta'], raw['rope_parameters']['rope_theta'])
    described = raw['quantization_config']
    self.assertEqual(described['quant_algo'], 'NVFP4')
    self.assertEqual(
        described['ignore'], quant['quantization']['exclude_modules']
    )
    self.assertContainsSubset(
        {'lm_head', 'model.embed_tokens', 'model.layers.1.mlp.gate'},
        described['ignore'],
    )
    self.assertEqual(quant['quantization']['group_size'], 16)
    self.assertIn('kv_cache_quant_algo', quant['quantization'])
    self.assertEqual(record['recipe'], 'nvfp4_final')
    self.assertEqual(scale, 1.0)

  def test_model_that_was_never_loaded(self):
    config = model_config.tiny(32)
    tree = policy.quantize_params(
        policy.Quantizer(policy.BF16), random_params(config, 0)
    )
    with tempfile.TemporaryDirectory() as scratch:
      out = pathlib.Path(scratch) / 'out'
      export.export(config, tree, out, target('bf16'))
      got_config, got = hf.load(out)
    same = dataclasses.replace(
        got_config, attention_block=config.attention_block
    )
    self.assertEqual(same, config)
    chex.assert_trees_all_equal(got, transformer.unstack(tree))
    self.assertEqual(hf_config.family_of(config), 'qwen3_moe')

  def test_memory_does_not_grow_with_the_number_of_layers(self):
    peaks = []
    for layers in (2, 8):
      config = dataclasses.replace(
          model_config.tiny(32),
          num_layers=layers,
          embed_dim=256,
          moe_dim=256,
      )
      tree = random_params(config, 0)
      with tempfile.TemporaryDirectory() as scratch:
        source = pathlib.Path(scratch) / 'source'
        export.export(config, tree, source, target('bf16'))
        tracemalloc.start()  # sees numpy's arrays: what is read and written
        export.convert(
            source,
            source.with_name('out'),
            target('nvfp4_high_precision', shard_bytes=1),
        )
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    self.assertLess(peaks[1], 1.2 * peaks[0])
