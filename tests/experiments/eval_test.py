"""The commands of eval."""

import contextlib
import io
import json
import pathlib
import shutil
import string
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import pytest
import tokenizers

from experiments import eval as evaluation
from experiments import run
from nvfp4_jax import export
from nvfp4_jax import recipes
from nvfp4_jax.models import param_counts

# Logits within tolerances, and tokens of one program.
pytestmark = pytest.mark.quick_compile

_GOLDEN = pathlib.Path(__file__).parents[1] / 'golden'
_QWEN = _GOLDEN / 'configs' / 'qwen3_30b_a3b.json'
_DEEPSEEK = _GOLDEN / 'configs' / 'deepseek_v3.json'


class CommandTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.root = pathlib.Path(root)

  def run_command(self, *args):
    """Returns what a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
      evaluation.main(args)
    return printed.getvalue()

  def rows(self, *args):
    return [json.loads(s) for s in self.run_command(*args).splitlines()]

  def stopped(self, *args):
    """Returns the one message of a command line that is refused."""
    printed, out = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stderr(printed),
        contextlib.redirect_stdout(out),
        self.assertRaises(SystemExit) as context,
    ):
      evaluation.main(args)
    self.assertEmpty(out.getvalue())
    code = context.exception.code
    self.assertNotIn(code, (0, None))
    if isinstance(code, str):  # Python prints it, and exits with 1.
      self.assertEmpty(printed.getvalue())
      self.assertLen(code.splitlines(), 1)
      return code
    return printed.getvalue()


class ParamsTest(CommandTest):

  def test_prints_tables(self):
    text = self.run_command('params', f'--config={_DEEPSEEK}')
    lines = [line.split('  ') for line in text.splitlines()]
    cells = [[c.strip() for c in line if c.strip()] for line in lines]
    routed = ['routed experts', '653,908,770,816', '97.449%', '20,434,649,088']
    self.assertIn(routed, cells)
    total = ['total', '671,026,419,200', '100.000%', '37,552,297,472']
    self.assertIn(total, cells)
    bf16 = ['bf16', '1,342,052,868,096', '1342.053', '100.00%', '16.000']
    self.assertIn(bf16, cells)
    self.assertIn('Not counted (multi-token prediction): layers.61', text)

  def test_tables_are_aligned(self):
    text = self.run_command('params', f'--config={_QWEN}')
    tables = text.split('\n\n')
    self.assertLen(tables, 2)
    for table in tables:
      lengths = {len(line) for line in table.splitlines()}
      self.assertLen(lengths, 1, table)
      self.assertLess(max(lengths), 80)

  def test_rows_of_classes_add_up_to_the_total(self):
    rows = self.rows('params', f'--config={_QWEN}', '--json')
    classes = [row for row in rows if row['kind'] == 'class']
    (total,) = (row for row in rows if row['kind'] == 'total')
    names = tuple(row['name'] for row in classes)
    self.assertEqual(names, param_counts.CLASSES)
    self.assertEqual(total['parameters'], 30_532_122_624)
    for key in ('parameters', 'active'):
      self.assertEqual(sum(row[key] for row in classes), total[key])
    self.assertAlmostEqual(sum(row['share'] for row in classes), 1.0)
    for row in rows:
      self.assertEqual(row['model_type'], 'qwen3_moe')

  def test_bytes_of_all_recipes(self):
    rows = self.rows('params', f'--config={_QWEN}', '--json')
    sizes = {r['name']: r['bytes'] for r in rows if r['kind'] == 'bytes'}
    self.assertEqual(tuple(sizes), tuple(recipes.RECIPES))
    self.assertEqual(sizes['bf16'], 2 * 30_532_122_624)
    matrix = 2048 * 768
    # 128 experts of 41 layers, the last seven being bfloat16.
    saved = 41 * 128 * 3 * (2 * matrix - matrix // 2 - matrix // 16 - 4)
    self.assertEqual(sizes['nvfp4_final'], sizes['bf16'] - saved)

  @parameterized.parameters(
      ('nvfp4_final', ['bf16', 'nvfp4_final']), ('bf16', ['bf16'])
  )
  def test_bytes_of_one_recipe(self, recipe, names):
    args = ('params', f'--config={_QWEN}', '--json', f'--recipe={recipe}')
    rows = [row for row in self.rows(*args) if row['kind'] == 'bytes']
    self.assertEqual([row['name'] for row in rows], names)
    for row in rows:
      bits = 8 * row['bytes'] / 30_532_122_624
      self.assertEqual(row['bits_per_parameter'], bits)
      self.assertAlmostEqual(row['share_of_bf16'], bits / 16)

  def test_layers_that_are_not_counted_have_rows(self):
    rows = self.rows('params', f'--config={_DEEPSEEK}', '--json')
    names = [row['name'] for row in rows if row['kind'] == 'not_counted']
    self.assertEqual(names, ['layers.61'])

  def test_a_folder_is_its_config(self):
    folder = _GOLDEN / 'hf' / 'glm4_moe'
    want = self.run_command('params', f'--config={folder / "config.json"}')
    got = self.run_command('params', f'--config={folder}')
    self.assertEqual(got, want)

  def test_rows_are_written_too(self):
    path = self.root / 'reports' / 'qwen.jsonl'
    flags = ('params', f'--config={_QWEN}')
    text = self.run_command(*flags, f'--output={path}')
    self.assertEqual(text, self.run_command(*flags))
    self.assertEqual(run.read_rows(path), self.rows(*flags, '--json'))

  def _narrow(self):
    """Writes a model whose expert width fills blocks of nvfp4, not mxfp8."""
    raw = json.loads(_QWEN.read_text()) | {'moe_intermediate_size': 48}
    path = self.root / 'config.json'
    path.write_text(json.dumps(raw))
    return path

  def test_a_recipe_that_cannot_be_used_says_why(self):
    text = self.run_command('params', f'--config={self._narrow()}')
    path = 'layers.0.mlp.experts.down_proj'
    self.assertRegex(text, rf'\nmxfp8: {path}: .*not a multiple of 32')
    rows = self.rows('params', f'--config={self.root}', '--json')
    sizes = {r['name']: r for r in rows if r['kind'] == 'bytes'}
    self.assertNotIn('bytes', sizes['mxfp8'])
    self.assertIn('bytes', sizes['nvfp4_final'])

  def test_it_is_an_error_if_it_was_asked_for(self):
    flags = ('params', f'--config={self._narrow()}')
    message = self.stopped(*flags, '--recipe=mxfp8')
    self.assertIn('not a multiple of 32', message)
    self.assertIn('recipe mxfp8', message)
    self.run_command(*flags, '--recipe=nvfp4_final')


class ErrorsTest(CommandTest):

  @parameterized.parameters(
      ('{"model_type": "gpt2"}', 'deepseek_v3'),
      ('{"model_type": "llama"}', 'num_hidden_layers is missing'),
      ('{"model_type": "llama"', 'sound JSON'),
      ('[]', 'not a JSON object'),
      ('{}', 'model_type None'),
  )
  def test_a_bad_file_stops(self, text, reason):
    path = self.root / 'config.json'
    path.write_text(text)
    for place in (path, self.root):
      message = self.stopped('params', f'--config={place}')
      self.assertIn(str(self.root), message)
      self.assertIn(reason, message)

  @parameterized.parameters('', 'missing.json', 'missing/config.json')
  def test_a_missing_file_stops(self, name):
    message = self.stopped('params', f'--config={self.root / name}')
    self.assertIn('no such file', message)

  def test_a_file_that_cannot_be_written_stops(self):
    folder = self.root / 'folder'
    folder.mkdir()
    self.stopped('params', f'--config={_QWEN}', f'--output={folder}')
    self.assertEqual(list(self.root.rglob('*')), [folder])

  @parameterized.parameters(
      ((), 'params'),
      (('param',), 'params'),
      (('params',), '--config'),
      (('params', f'--config={_QWEN}', '--bogus'), '--bogus'),
      (('params', f'--config={_QWEN}', '--recipe=nvfp5'), 'nvfp4_final'),
  )
  def test_a_wrong_command_line_stops(self, args, name):
    self.assertIn(name, self.stopped(*args))


class ModelTest(CommandTest):
  """Commands that run a model: a golden one, with a tokenizer of bytes."""

  def setUp(self):
    super().setUp()
    self.model = self.root / 'model'
    shutil.copytree(_GOLDEN / 'hf' / 'llama', self.model)
    symbols = string.ascii_letters + string.digits + '+?Ġ'
    rest = set(tokenizers.pre_tokenizers.ByteLevel.alphabet()) - set(symbols)
    symbols += ''.join(sorted(rest))[: 128 - len(symbols)]
    vocabulary = {symbol: i for i, symbol in enumerate(symbols)}
    words = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False
    )
    words.decoder = tokenizers.decoders.ByteLevel()
    words.save(str(self.model / 'tokenizer.json'))
    template = "{{ messages[0]['content'] }}"
    (self.model / 'tokenizer_config.json').write_text(
        json.dumps({'chat_template': template})
    )

  def test_generate_is_the_same_from_a_quantized_folder(self):
    quantized = self.root / 'quantized'
    recipe = recipes.get('nvfp4_high_precision')
    target = export.Target(recipe.sampler, 'modelopt', recipe.name)
    export.convert(self.model, quantized, target)
    answers = []
    for folder in (self.model, quantized):
      printed = self.run_command(
          'generate',
          f'--model={folder}',
          f'--recipe={recipe.name}',
          '--max_new_tokens=2',
          '--completions=2',
      )
      *lines, row = printed.splitlines()
      answers.append(lines)
      row = json.loads(row)
      self.assertGreater(row['tokens_per_second'], 0)
      self.assertEqual(row['prompt_tokens'], len('Whatis7+5?') + 4)
    self.assertEqual(*answers)

  def test_generate_refuses_another_recipe_than_the_folder_has(self):
    quantized = self.root / 'quantized'
    recipe = recipes.get('nvfp4_high_precision')
    target = export.Target(recipe.sampler, 'modelopt', recipe.name)
    export.convert(self.model, quantized, target)
    message = self.stopped('generate', f'--model={quantized}', '--recipe=mxfp8')
    self.assertRegex(message, 'nvfp4')

  def test_reference_agrees_with_float32(self):
    float32, bfloat16 = self.rows('reference', f'--model={self.model}')
    self.assertLess(float32['max_abs_difference'], 1e-5)
    self.assertGreater(bfloat16['max_abs_difference'], 1e-5)
    self.assertEqual(float32['argmax_equal'], 1.0)


if __name__ == '__main__':
  absltest.main()
