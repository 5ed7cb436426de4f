"""Tests of models.gguf."""

import json
import pathlib
import tempfile
from unittest import mock

from absl.testing import absltest
from absl.testing import parameterized
import ml_dtypes
import numpy as np
from tokenizers import pre_tokenizers

from nvfp4_jax import files
from nvfp4_jax import safetensors
from nvfp4_jax import tokenizer
from nvfp4_jax.models import gguf as converter

try:
  import gguf
except ImportError:
  gguf = None

_SPECIAL = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
_MERGES = ['Ġ t', '1 2', 'h e', 'Ġt he', '# #']
_TOKENS = [
    *_SPECIAL,
    *_ALPHABET,
    *(merge.replace(' ', '') for merge in _MERGES),
    '<tool>',
]
_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4

_HIDDEN, _MLP, _HEADS, _KV_HEADS, _HEAD = 64, 96, 4, 2, 16
_SHAPES = {
    'attn_norm': (_HIDDEN,),
    'attn_q': (_HEADS * _HEAD, _HIDDEN),
    'attn_k': (_KV_HEADS * _HEAD, _HIDDEN),
    'attn_v': (_KV_HEADS * _HEAD, _HIDDEN),
    'attn_output': (_HIDDEN, _HEADS * _HEAD),
    'ffn_norm': (_HIDDEN,),
    'ffn_gate': (_MLP, _HIDDEN),
    'ffn_up': (_MLP, _HIDDEN),
    'ffn_down': (_HIDDEN, _MLP),
}
_TYPES = {'attn_v': 'F16', 'attn_output': 'Q8_0', 'ffn_up': 'F32'}


def _metadata():
  types = [_CONTROL] * 3 + [_NORMAL] * (len(_TOKENS) - 4) + [_USER_DEFINED]
  return {
      'llama.block_count': 2,
      'llama.context_length': 128,
      'llama.embedding_length': _HIDDEN,
      'llama.feed_forward_length': _MLP,
      'llama.attention.head_count': _HEADS,
      'llama.attention.head_count_kv': _KV_HEADS,
      'llama.attention.layer_norm_rms_epsilon': 1e-5,
      'llama.rope.freq_base': 5e5,
      'llama.rope.dimension_count': _HEAD,
      'tokenizer.ggml.model': 'gpt2',
      'tokenizer.ggml.pre': 'smollm',
      'tokenizer.ggml.tokens': _TOKENS,
      'tokenizer.ggml.token_type': types,
      'tokenizer.ggml.merges': _MERGES,
      'tokenizer.ggml.bos_token_id': 1,
      'tokenizer.ggml.eos_token_id': 2,
      'tokenizer.ggml.unknown_token_id': 0,
      'tokenizer.ggml.padding_token_id': 2,
      'tokenizer.chat_template': '{{ messages[0].content }}{{ eos_token }}',
  }


def _tensors():
  """Returns random weights by GGUF name, each with the type to store it as."""
  rng = np.random.default_rng(0)
  shapes = {'token_embd': (len(_TOKENS), _HIDDEN), 'output_norm': (_HIDDEN,)}
  for i in range(2):
    shapes |= {f'blk.{i}.{name}': shape for name, shape in _SHAPES.items()}
  return {
      f'{name}.weight': (
          rng.normal(size=shape).astype(np.float32),
          'F32' if len(shape) == 1 else _TYPES.get(name[6:], 'Q4_1'),
      )
      for name, shape in shapes.items()
  }


def _write(path, metadata, tensors, architecture='llama'):
  """Writes a GGUF file; returns the bytes of its tensors by name."""
  writer = gguf.GGUFWriter(path, architecture)
  for key, value in metadata.items():
    add = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }[type(value)]
    add(key, value)
  stored = {}
  for name, (weight, type_name) in tensors.items():
    kind = gguf.GGMLQuantizationType[type_name]
    stored[name] = gguf.quantize(weight, kind)
    writer.add_tensor(name, stored[name], raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return stored


def _from_q4_1(data):
  """Returns the float32 values of rows of Q4_1 blocks, in plain numpy.

  A block is 20 bytes: float16 step and minimum, then 32 codes of four bits, the
  first half of the values in the low nibbles.
  """
  blocks = data.reshape(data.shape[0], -1, 20)
  step, low = (
      np.ascontiguousarray(blocks[..., i : i + 2])
      .view(np.float16)
      .astype(np.float32)
      for i in (0, 2)
  )
  packed = blocks[..., 4:]
  codes = np.concatenate([packed & 15, packed >> 4], -1).astype(np.float32)
  return (step * codes + low).reshape(data.shape[0], -1)


@absltest.skipIf(gguf is None, 'needs the extra: pip install nvfp4-jax[gguf]')
class GgufTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.src = pathlib.Path(root) / 'tiny.gguf'
    self.dst = pathlib.Path(root) / 'tiny'
    self.metadata, self.tensors = _metadata(), _tensors()

  def write(self, architecture='llama'):
    return _write(self.src, self.metadata, self.tensors, architecture)

  def convert(self, **kwargs):
    """Returns the bytes of the GGUF file's tensors and the written weights."""
    stored = self.write()
    converter.convert(self.src, self.dst, **kwargs)
    infos = safetensors.read_index(self.dst)
    return stored, {k: safetensors.read_tensor(v) for k, v in infos.items()}

  def read(self, name):
    return json.loads((self.dst / name).read_text())

  def tokenizer(self, **metadata):
    for name, value in metadata.items():
      self.metadata[f'tokenizer.ggml.{name}'] = value
    self.convert()
    return tokenizer.load(self.dst)

  def assert_refused(self, reason, error=files.CheckpointError):
    self.write()
    with self.assertRaisesRegex(error, reason):
      converter.convert(self.src, self.dst)
    self.assertEqual(list(self.src.parent.iterdir()), [self.src])


class WeightsTest(GgufTest):

  def test_q4_1_is_as_in_plain_numpy(self):
    stored, weights = self.convert(dtype='float32')
    np.testing.assert_array_equal(
        weights['model.layers.1.mlp.down_proj.weight'],
        _from_q4_1(stored['blk.1.ffn_down.weight']),
    )
    np.testing.assert_array_equal(
        weights['model.embed_tokens.weight'],
        _from_q4_1(stored['token_embd.weight']),
    )

  def test_stored_floats_are_kept(self):
    stored, weights = self.convert(dtype='float32')
    for name, gguf_name in (
        ('model.norm', 'output_norm'),
        ('model.layers.0.input_layernorm', 'blk.0.attn_norm'),
        ('model.layers.0.mlp.up_proj', 'blk.0.ffn_up'),
        ('model.layers.0.self_attn.v_proj', 'blk.0.attn_v'),
    ):
      np.testing.assert_array_equal(
          weights[f'{name}.weight'], stored[f'{gguf_name}.weight']
      )

  def test_q8_0_is_step_times_code(self):
    stored, weights = self.convert(dtype='float32')
    blocks = stored['blk.0.attn_output.weight'].reshape(_HIDDEN, -1, 34)
    step = np.ascontiguousarray(blocks[..., :2]).view(np.float16)
    codes = np.ascontiguousarray(blocks[..., 2:]).view(np.int8)
    np.testing.assert_array_equal(
        weights['model.layers.0.self_attn.o_proj.weight'],
        (step.astype(np.float32) * codes).reshape(_HIDDEN, -1),
    )

  @parameterized.parameters(('q', _HEADS), ('k', _KV_HEADS))
  def test_rows_of_queries_and_keys_are_put_back(self, letter, heads):
    stored, weights = self.convert(dtype='float32')
    rows = _from_q4_1(stored[f'blk.0.attn_{letter}.weight'])
    got = weights[f'model.layers.0.self_attn.{letter}_proj.weight']
    for head in range(heads):
      for i in range(_HEAD // 2):
        first = head * _HEAD
        # The pair that RoPE turns by angle i, in either file.
        np.testing.assert_array_equal(got[first + i], rows[first + 2 * i])
        np.testing.assert_array_equal(
            got[first + _HEAD // 2 + i], rows[first + 2 * i + 1]
        )

  def test_bfloat16_is_float32_rounded_once(self):
    self.convert()
    for name, want in converter.dequantize(self.src).items():
      info = safetensors.read_index(self.dst)[name]
      got = safetensors.read_tensor(info)
      self.assertEqual(got.dtype, ml_dtypes.bfloat16)
      bits = want.view(np.uint32).astype(np.uint64)
      bits = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
      np.testing.assert_array_equal(got.view(np.uint16), bits)

  def test_all_names_are_those_of_hugging_face(self):
    _, weights = self.convert()
    parts = [f'self_attn.{x}_proj' for x in 'qkvo']
    parts += [f'mlp.{x}_proj' for x in ('gate', 'up', 'down')]
    parts += ['input_layernorm', 'post_attention_layernorm']
    want = {f'model.layers.{i}.{x}.weight' for i in range(2) for x in parts}
    want |= {'model.embed_tokens.weight', 'model.norm.weight'}
    self.assertEqual(set(weights), want)
    self.assertTrue(self.read('config.json')['tie_word_embeddings'])

  def test_a_head_of_its_own_is_kept(self):
    weight = self.tensors['token_embd.weight'][0] + 1
    self.tensors['output.weight'] = (weight, 'F32')
    _, weights = self.convert(dtype='float32')
    np.testing.assert_array_equal(weights['lm_head.weight'], weight)
    self.assertFalse(self.read('config.json')['tie_word_embeddings'])


class FilesTest(GgufTest):

  def test_config_speaks_to_both_generations_of_readers(self):
    self.convert()
    got = self.read('config.json')
    want = {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'hidden_size': _HIDDEN,
        'intermediate_size': _MLP,
        'num_hidden_layers': 2,
        'num_attention_heads': _HEADS,
        'num_key_value_heads': _KV_HEADS,
        'head_dim': _HEAD,
        'max_position_embeddings': 128,
        'rms_norm_eps': 1e-5,
        'rope_theta': 5e5,
        'rope_parameters': {'rope_theta': 5e5, 'rope_type': 'default'},
        'vocab_size': len(_TOKENS),
        'dtype': 'bfloat16',
        'torch_dtype': 'bfloat16',
        'eos_token_id': [2],
    }
    self.assertEqual({name: got[name] for name in want}, want)

  def test_eos_ids_are_a_list_with_the_end_of_turn(self):
    tok = self.tokenizer(eot_token_id=0, eom_token_id=2)
    self.assertEqual(
        self.read('generation_config.json'),
        {'bos_token_id': 1, 'eos_token_id': [2, 0], 'pad_token_id': 2},
    )
    self.assertEqual(tok.eos_ids, (2, 0))

  def test_the_manifest_vouches_for_the_folder(self):
    self.convert()
    record = files.check_manifest(self.dst)
    assert record is not None
    self.assertEqual(
        record['converted_from'],
        {'name': 'tiny.gguf', 'sha256': files.sha256(self.src)},
    )
    self.assertLen(self.read(files.MANIFEST)['files'], 5)

  def test_a_folder_that_is_there_stays(self):
    self.write()
    self.dst.mkdir()
    with self.assertRaisesRegex(FileExistsError, 'tiny is there already'):
      converter.convert(self.src, self.dst)
    self.assertEmpty(list(self.dst.iterdir()))

  @parameterized.parameters('write_file', 'write_manifest')
  def test_a_failure_leaves_nothing(self, name):
    self.write()
    module = safetensors if name == 'write_file' else files
    with (
        mock.patch.object(module, name, side_effect=OSError('disk full')),
        self.assertRaisesRegex(OSError, 'disk full'),
    ):
      converter.convert(self.src, self.dst)
    self.assertEqual(list(self.src.parent.iterdir()), [self.src])

  def test_what_a_killed_run_left_is_replaced(self):
    partial = self.dst.with_name('tiny.partial')
    partial.mkdir()
    (partial / 'old').touch()
    self.convert()
    self.assertFalse(partial.exists())
    self.assertFalse((self.dst / 'old').exists())


class TokenizerTest(GgufTest):

  def encode(self, tok, text, **kwargs):
    return [_TOKENS[i] for i in tokenizer.encode(tok, text, **kwargs)]

  @parameterized.parameters(
      ('12', ['1', '2']),
      ('a 12', ['a', 'Ġ', '1', '2']),
      (' the', ['Ġthe']),
      ('the', ['t', 'he']),
      ('  the', ['Ġ', 'Ġthe']),
      ('###', ['##', '#']),
      ('é', ['Ã', '©']),
      ('<|im_start|>he<|im_end|>', ['<|im_start|>', 'he', '<|im_end|>']),
      ('a<tool>b', ['a', '<tool>', 'b']),
  )
  def test_smollm_splits_digits_and_then_words(self, text, want):
    self.assertEqual(self.encode(self.tokenizer(), text), want)

  def test_gpt2_keeps_digits_together(self):
    tok = self.tokenizer(pre='gpt-2')
    self.assertEqual(self.encode(tok, 'a 12'), ['a', 'Ġ', '12'])

  def test_llama_cuts_numbers_after_three_digits(self):
    tok = self.tokenizer(pre='llama-bpe')
    self.assertEqual(self.encode(tok, '0012'), ['0', '0', '1', '2'])
    self.assertEqual(self.encode(tok, '12'), ['12'])
    # '(he' is one piece, so no merge of 'h e' is lost; ' (' another.
    self.assertEqual(self.encode(tok, '(he ##'), ['(', 'he', 'Ġ', '##'])
    ids = tokenizer.encode(tok, 'he', add_special_tokens=True)
    self.assertEqual(ids[0], 1)

  def test_a_piece_that_is_a_token_needs_no_merge_in_llama(self):
    self.metadata['tokenizer.ggml.merges'] = _MERGES[:3]
    tok = self.tokenizer(pre='llama-bpe')
    self.assertEqual(self.encode(tok, ' the'), ['Ġthe'])

  def test_smollm_adds_nothing_unless_asked_to(self):
    tok = self.tokenizer()
    got = self.encode(tok, 'he', add_special_tokens=True)
    self.assertEqual(got, ['he'])

  def test_bos_and_eos_are_added_where_the_file_says_so(self):
    tok = self.tokenizer(add_bos_token=True, add_eos_token=True)
    got = self.encode(tok, 'he', add_special_tokens=True)
    self.assertEqual(got, ['<|im_start|>', 'he', '<|im_end|>'])

  @parameterized.parameters('smollm', 'gpt-2', 'llama-bpe')
  def test_any_text_comes_back(self, pre):
    tok = self.tokenizer(pre=pre)
    text = " Größe\r\n\n  日本語 🙂 '12' 3.14159\t\x00 we'll "
    ids = tokenizer.encode(tok, text)
    self.assertEqual(tokenizer.decode(tok, ids), text)

  def test_user_defined_tokens_are_text_and_control_tokens_are_not(self):
    tok = self.tokenizer()
    ids = tokenizer.encode(tok, '<tool>x<|im_end|>')
    self.assertEqual(tokenizer.decode(tok, ids), '<tool>x')

  def test_the_chat_template_comes_along(self):
    messages = [{'role': 'user', 'content': 'hi'}]
    got = tokenizer.render_chat(self.tokenizer(), messages)
    self.assertEqual(got, 'hi<|im_end|>')


class RefusalTest(GgufTest):

  @parameterized.parameters('qwen2', 'gemma')
  def test_another_architecture_is_named(self, architecture):
    self.write(architecture)
    with self.assertRaisesRegex(files.CheckpointError, architecture):
      converter.convert(self.src, self.dst)

  @parameterized.parameters(
      'output_norm.weight', 'blk.1.ffn_up.weight', 'token_embd.weight'
  )
  def test_a_missing_tensor_is_named(self, name):
    del self.tensors[name]
    self.assert_refused(rf"lacks \['{name}'\]")

  @parameterized.parameters(
      'rope_freqs.weight', 'blk.0.attn_q.bias', 'blk.2.ffn_up.weight'
  )
  def test_an_extra_tensor_is_named(self, name):
    self.tensors[name] = (np.ones(_HIDDEN, np.float32), 'F32')
    self.assert_refused(rf"has unknown \['{name}'\]")

  def test_another_shape_is_named(self):
    weight = np.ones((_HIDDEN, _HIDDEN), np.float32)
    self.tensors['blk.0.attn_k.weight'] = (weight, 'F32')
    self.assert_refused(
        r'blk.0.attn_k.weight has the shape \(64, 64\), not \(32, 64\)'
    )

  @parameterized.parameters(
      ('rope.scaling.type', 'linear', 'rope.scaling.type'),
      ('expert_count', 8, 'expert_count'),
      ('rope.dimension_count', 8, 'rope.dimension_count is 8, not 16'),
      ('attention.head_count', 0, 'head_count is 0'),
      ('attention.head_count_kv', [2, 1], r'head_count_kv is \[2, 1\]'),
      ('rope.freq_base', -1.0, 'freq_base is -1.0'),
  )
  def test_metadata_that_change_the_model_are_refused(self, key, value, reason):
    self.metadata[f'llama.{key}'] = value
    self.assert_refused(reason)

  @parameterized.parameters(
      ('model', 'llama', "'llama', not 'gpt2'"),
      ('pre', 'qwen2', "'qwen2'; known are.*gpt-2.*llama-bpe.*smollm"),
      ('add_space_prefix', True, 'add_space_prefix'),
      ('token_type', [1], 'tokens but 1 types'),
      ('token_type', [6] * len(_TOKENS), 'has the type 6'),
      ('tokens', ['a'] * len(_TOKENS), "'a' has two ids"),
      ('merges', ['a b c'], "'a b c' is not of two tokens"),
      ('merges', ['a b'], 'holds no tokenizer'),
      ('eos_token_id', 5000, 'eos token 5000'),
  )
  def test_a_tokenizer_of_another_kind_is_refused(self, key, value, reason):
    self.metadata[f'tokenizer.ggml.{key}'] = value
    self.assert_refused(reason)

  @parameterized.parameters(
      'tokenizer.ggml.merges',
      'tokenizer.ggml.pre',
      'tokenizer.ggml.tokens',
      'tokenizer.ggml.eos_token_id',
      'llama.block_count',
      'llama.attention.layer_norm_rms_epsilon',
  )
  def test_missing_metadata_are_named(self, key):
    del self.metadata[key]
    self.assert_refused(key.rpartition('.')[2])

  def test_another_file_is_refused(self):
    self.assertFalse(self.src.exists())
    with self.assertRaisesRegex(files.CheckpointError, 'not a file'):
      converter.convert(self.src, self.dst)
    self.src.write_bytes(b'PK' * 100)
    with self.assertRaisesRegex(files.CheckpointError, 'not a GGUF file'):
      converter.convert(self.src, self.dst)

  @parameterized.parameters(0.01, 0.3, 0.99)
  def test_a_file_that_was_cut_short_is_refused(self, part):
    self.write()
    data = self.src.read_bytes()
    self.src.write_bytes(data[: int(part * len(data))])
    with self.assertRaisesRegex(files.CheckpointError, 'not a GGUF file'):
      converter.convert(self.src, self.dst)

  def test_another_dtype_is_named(self):
    self.write()
    with self.assertRaisesRegex(ValueError, "'float16' is none of"):
      converter.convert(self.src, self.dst, dtype='float16')

  def test_a_missing_package_is_named(self):
    self.write()
    with (
        mock.patch.dict('sys.modules', gguf=None),
        self.assertRaisesRegex(ImportError, r'nvfp4-jax\[gguf\]'),
    ):
      converter.convert(self.src, self.dst)


if __name__ == '__main__':
  absltest.main()
