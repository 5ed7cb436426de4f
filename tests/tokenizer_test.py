"""Tests of tokenizer."""

import json
import pathlib
import tempfile

from absl.testing import absltest
from absl.testing import parameterized
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from nvfp4_jax import files
from nvfp4_jax import tokenizer

_SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>')
_CHATML = """\
{% for message in messages %}
    {{- '<|im_start|>' + message['role'] }}
    {%- if message.role == 'system' %}
 (rules)
    {% endif %}
{{ '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
_MESSAGES = [{'role': 'user', 'content': 'Hi <b>'}]


def _backend():
  """Returns a byte-level BPE: three special tokens, 256 bytes, two merges."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  vocabulary = [*_SPECIAL, *alphabet, 'th', 'the']
  model = models.BPE(
      {token: i for i, token in enumerate(vocabulary)},
      [('t', 'h'), ('th', 'e')],
  )
  backend = tokenizers.Tokenizer(model)
  backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  backend.decoder = decoders.ByteLevel()
  backend.add_special_tokens(list(_SPECIAL))
  return backend


class TokenizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    root = self.enterContext(tempfile.TemporaryDirectory())
    self.folder = pathlib.Path(root)
    _backend().save(str(self.folder / 'tokenizer.json'))
    self.write('tokenizer_config.json', {'eos_token': '<|im_end|>'})

  def write(self, name, value):
    text = value if isinstance(value, str) else json.dumps(value)
    (self.folder / name).write_text(text)

  def load(self):
    return tokenizer.load(self.folder)

  def render(self, template, messages=_MESSAGES, **kwargs):
    self.write('chat_template.jinja', template)
    return tokenizer.render_chat(self.load(), messages, **kwargs)


class TextTest(TokenizerTest):

  @parameterized.parameters('', 'the other', ' Größe \n\t日本語 🙂', 'a\0b')
  def test_text_comes_back(self, text):
    tok = self.load()
    self.assertEqual(tokenizer.decode(tok, tokenizer.encode(tok, text)), text)

  def test_merges_are_used(self):
    ids = tokenizer.encode(self.load(), 'the')
    self.assertEqual(ids, [len(_SPECIAL) + 256 + 1])

  def test_special_tokens_in_text_are_tokens(self):
    tok = self.load()
    ids = tokenizer.encode(tok, '<|im_start|>the<|im_end|>')
    self.assertEqual(ids, [1, 260, 2])
    self.assertEqual(tokenizer.decode(tok, ids), 'the')
    self.assertEqual(
        tokenizer.decode(tok, ids, skip_special_tokens=False),
        '<|im_start|>the<|im_end|>',
    )

  def test_special_tokens_are_added_on_request_only(self):
    backend = _backend()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single='<|endoftext|> $A', special_tokens=[('<|endoftext|>', 0)]
    )
    backend.save(str(self.folder / 'tokenizer.json'))
    tok = self.load()
    self.assertEqual(tokenizer.encode(tok, 'the'), [260])
    self.assertEqual(
        tokenizer.encode(tok, 'the', add_special_tokens=True), [0, 260]
    )

  def test_saved_truncation_and_padding_are_off(self):
    backend = _backend()
    backend.enable_truncation(2)
    backend.enable_padding(length=8)
    backend.save(str(self.folder / 'tokenizer.json'))
    self.assertLen(tokenizer.encode(self.load(), 'abcd'), 4)

  def test_half_a_character_decodes_to_the_replacement_character(self):
    tok = self.load()
    ids = tokenizer.encode(tok, 'é')
    self.assertEqual(tokenizer.decode(tok, ids[:1]), '\ufffd')

  @parameterized.parameters(-1, 261, 1 << 40)
  def test_an_id_without_token_is_named(self, i):
    with self.assertRaisesRegex(ValueError, f'^{i} is none of the 261 '):
      tokenizer.decode(self.load(), [3, i])

  def test_a_lone_surrogate_is_refused(self):
    with self.assertRaisesRegex(ValueError, 'surrogates'):
      tokenizer.encode(self.load(), 'a\ud800')


class LoadTest(TokenizerTest):

  @parameterized.parameters(
      (None, None, (2,)),
      (0, None, (0, 2)),
      ([1, 0], None, (1, 0, 2)),
      ([2, 0], 2, (2, 0)),
      (None, [0, 1], (0, 1, 2)),
      (1, 0, (1, 0, 2)),
      ([], 2, (2,)),
  )
  def test_eos_ids_are_a_union_in_order(self, generation, model, want):
    self.write('generation_config.json', {'eos_token_id': generation})
    self.write('config.json', {'eos_token_id': model})
    self.assertEqual(self.load().eos_ids, want)

  def test_eos_ids_need_neither_config(self):
    self.assertEqual(self.load().eos_ids, (2,))
    self.write('tokenizer_config.json', {'eos_token': None})
    self.assertEqual(self.load().eos_ids, ())

  @parameterized.parameters(
      (261,), (-1,), (1 << 40,), (True,), (2.0,), ('2',), ([[2]],)
  )
  def test_an_eos_outside_the_vocabulary_is_named(self, value):
    self.write('generation_config.json', {'eos_token_id': value})
    with self.assertRaisesRegex(files.CheckpointError, 'EOS .*of 261 tokens'):
      self.load()

  def test_an_unknown_eos_token_is_named(self):
    self.write('tokenizer_config.json', {'eos_token': '</s>'})
    with self.assertRaisesRegex(files.CheckpointError, "EOS '</s>'"):
      self.load()

  def test_special_tokens_may_be_objects(self):
    token = {'content': '<|im_end|>', 'lstrip': False}
    self.write(
        'tokenizer_config.json',
        {'eos_token': token, 'bos_token': '<|im_start|>', 'pad_token': None},
    )
    tok = self.load()
    want = {'eos_token': '<|im_end|>', 'bos_token': '<|im_start|>'}
    self.assertEqual(tok.special_tokens, want)
    self.assertEqual(tok.eos_ids, (2,))

  @parameterized.parameters('tokenizer.json', 'tokenizer_config.json')
  def test_a_missing_file_is_named(self, name):
    (self.folder / name).unlink()
    with self.assertRaisesRegex(files.CheckpointError, name):
      self.load()

  @parameterized.parameters('', '{}', '[]', '{"model": {"type": "BPE"}}')
  def test_a_malformed_tokenizer_is_refused(self, text):
    self.write('tokenizer.json', text)
    with self.assertRaisesRegex(files.CheckpointError, 'not a tokenizer'):
      self.load()

  def test_the_template_file_goes_first(self):
    self.assertIsNone(self.load().chat_template)
    self.write('tokenizer_config.json', {'chat_template': 'config'})
    self.assertEqual(self.load().chat_template, 'config')
    self.write('chat_template.jinja', 'file')
    self.assertEqual(self.load().chat_template, 'file')

  def test_the_default_of_named_templates_is_taken(self):
    named = [
        {'name': 'tool_use', 'template': 'a'},
        {'name': 'default', 'template': 'b'},
    ]
    self.write('tokenizer_config.json', {'chat_template': named})
    self.assertEqual(self.load().chat_template, 'b')
    self.write('tokenizer_config.json', {'chat_template': named[:1]})
    with self.assertRaisesRegex(files.CheckpointError, "'tool_use'.*'default'"):
      self.load()

  @parameterized.parameters(
      (5,), (['a'],), ([{'name': 'default', 'template': 5}],), ({'a': 'b'},)
  )
  def test_a_template_of_another_type_is_refused(self, value):
    self.write('tokenizer_config.json', {'chat_template': value})
    with self.assertRaisesRegex(files.CheckpointError, 'chat_template'):
      self.load()


class RenderTest(TokenizerTest):

  @parameterized.parameters(True, False)
  def test_chatml_is_as_by_hand(self, prompt):
    messages = [
        {'role': 'system', 'content': 'Be brief.'},
        {'role': 'user', 'content': 'What is 7 + 5?'},
        {'role': 'assistant', 'content': '<12> & "é"'},
    ]
    got = self.render(_CHATML, messages, add_generation_prompt=prompt)
    want = (
        '<|im_start|>system (rules)\n'
        '\nBe brief.<|im_end|>\n'
        '<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n'
        '<|im_start|>assistant\n<12> & "é"<|im_end|>\n'
    )
    self.assertEqual(got, want + '<|im_start|>assistant\n' * prompt)

  def test_blocks_leave_no_line_behind(self):
    template = 'a\n  {% if true %}\nb\n  {% endif %}\nc\n'
    self.assertEqual(self.render(template), 'a\nb\nc')

  def test_json_is_not_escaped(self):
    value = {'é': ['<a> & "日"', None, True]}
    got = self.render('{{ x | tojson }}', variables={'x': value})
    self.assertEqual(got, '{"é": ["<a> & \\"日\\"", null, true]}')
    got = self.render('{{ [1] | tojson(indent=2) }}')
    self.assertEqual(got, '[\n  1\n]')

  def test_loop_controls_and_generation_are_known(self):
    got = self.render(
        '{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}'
        '{% if i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}'
        '{% generation %}{{ eos_token }}{% endgeneration %}'
    )
    self.assertEqual(got, '023<|im_end|>')

  def test_the_date_is_there_only_if_given(self):
    template = '{{ strftime_now("%Y") if strftime_now is defined }}'
    self.assertEqual(self.render(template), '')
    variables = {'strftime_now': lambda form: f'now {form}'}
    self.assertEqual(self.render(template, variables=variables), 'now %Y')

  def test_further_fields_of_a_message_are_passed_on(self):
    messages = [{'role': 'user', 'content': '', 'name': 'Ada'}]
    self.assertEqual(self.render('{{ messages[0].name }}', messages), 'Ada')

  def test_a_render_leaves_nothing_to_the_next(self):
    # The compiled template is shared, its count of steps is not.
    template = '{% for i in range(60000) %}{% endfor %}{{ messages|length }}'
    self.assertEqual(self.render(template), '1')
    self.assertEqual(self.render(template, _MESSAGES * 2), '2')

  @parameterized.parameters(
      ([],),
      ('hi',),
      (['hi'],),
      ([{'role': 'user'}],),
      ([{'role': 1, 'content': 'x'}],),
      ([{'role': 'user', 'content': [{'type': 'text'}]}],),
  )
  def test_malformed_messages_are_refused(self, messages):
    with self.assertRaisesRegex(ValueError, 'message|Message 0'):
      self.render('x', messages)

  @parameterized.parameters('messages', 'eos_token', '#steps', 'a b')
  def test_a_variable_cannot_take_another_name(self, name):
    with self.assertRaisesRegex(ValueError, name):
      self.render('x', variables={name: 1})

  def test_no_template_is_an_error(self):
    with self.assertRaisesRegex(tokenizer.TemplateError, 'no chat template'):
      tokenizer.render_chat(self.load(), _MESSAGES)


class SandboxTest(TokenizerTest):

  def assert_fails(self, template, reason, **kwargs):
    with self.assertRaisesRegex(tokenizer.TemplateError, reason):
      self.render(template, **kwargs)

  @parameterized.parameters(
      "{{ ''.__class__.__mro__ }}",
      "{{ ''.__class__.__base__.__subclasses__() }}",
      '{{ cycler.__init__.__globals__ }}',
      '{{ raise_exception.__globals__.os }}',
      "{{ (''|attr('__class__')).x }}",
      "{{ ('{0.__class__.__mro__}'.format('')).x }}",
      "{{ '%s'.__mod__(1) }}",
      '{{ self._TemplateReference__context.environment }}',
      '{{ messages.append.__self__ }}',
  )
  def test_internals_are_out_of_reach(self, template):
    self.assert_fails(template, 'unsafe|undefined|no attribute')

  @parameterized.parameters(
      '{{ messages.append(1) }}',
      '{{ messages.clear() }}',
      "{{ messages[0].update(role='x') }}",
      "{% set m = messages[0] %}{% set m.role = 'x' %}",
      "{{ messages[0].__setitem__('role', 'x') }}",
  )
  def test_arguments_are_not_changed(self, template):
    messages = [dict(message) for message in _MESSAGES]
    self.assert_fails(template, 'unsafe|namespace', messages=messages)
    self.assertEqual(messages, _MESSAGES)

  @parameterized.parameters(
      "{% import 'os' as os %}",
      "{% include 'tokenizer.json' %}",
      "{% extends 'tokenizer.json' %}",
      "{{ __import__('os') }}",
      "{{ open('tokenizer.json') }}",
      '{{ lipsum(n=9) }}',
  )
  def test_nothing_else_is_read(self, template):
    self.assert_fails(template, 'loader|undefined')

  @parameterized.parameters(
      '{% for i in range(10**9) %}{% endfor %}',
      '{% set r = range(1000) %}'
      '{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}',
      '{% set r = range(1000) %}'
      '{% for i in r %}{% for j in r if false %}{% endfor %}{% endfor %}',
      '{% for i in range(2) recursive %}{{ loop(range(2)) }}{% endfor %}',
      '{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}',
      '{% macro f(n) %}{% if n %}{{ f(n - 1) ~ f(n - 1) }}{% endif %}'
      '{% endmacro %}{{ f(40) }}',
      '{% block b %}{{ self.b() }}{% endblock %}',
  )
  def test_endless_loops_end(self, template):
    self.assert_fails(template, 'Range too big|steps|recursion')

  @parameterized.parameters(
      "{{ 'x' * 10**9 }}",
      '{{ 10**9 * [0] }}',
      '{{ 2 ** 1000000000 }}',
      '{% set ns = namespace(n=9) %}'
      '{% for i in range(50) %}{% set ns.n = ns.n * ns.n %}{% endfor %}',
  )
  def test_products_and_powers_are_bounded(self, template):
    self.assert_fails(template, 'A product or power has size')

  def test_products_are_those_of_python(self):
    got = self.render("{{ '=' * 3 }}{{ 2 ** 10 }}{{ 0.5 * 4 }}{{ 2 ** -1 }}")
    self.assertEqual(got, '===10242.00.5')

  def test_output_is_bounded(self):
    line = 'x' * 1000
    self.assert_fails(
        f'{{% for i in range(10000) %}}{line}{{% endfor %}}', 'characters'
    )

  def test_the_template_is_bounded(self):
    self.write('tokenizer_config.json', {'chat_template': 'x' * 140_000})
    with self.assertRaisesRegex(tokenizer.TemplateError, '140000 bytes'):
      tokenizer.render_chat(self.load(), _MESSAGES)
    self.write('chat_template.jinja', 'x' * 140_000)
    with self.assertRaisesRegex(files.CheckpointError, 'chat_template.jinja'):
      self.load()

  @parameterized.parameters(
      '{% if %}', '{{ ', '{% nonsense %}', '{{ ' + '(' * 50_000
  )
  def test_a_malformed_template_is_refused(self, template):
    self.assert_fails(template, 'The chat template failed')

  def test_a_template_may_refuse_the_messages(self):
    self.assert_fails(
        "{{ raise_exception('roles must alternate') }}", 'roles must alternate'
    )

  def test_any_error_is_a_template_error(self):
    self.assert_fails('{{ 1 / 0 }}', 'ZeroDivisionError')
    self.assert_fails('{{ messages[0].content + 1 }}', 'TypeError')
    self.assert_fails('{{ nothing.there }}', "'nothing' is undefined")


if __name__ == '__main__':
  absltest.main()
