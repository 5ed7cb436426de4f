"""Text to token ids and back, and chats to text.

A checkpoint brings its tokenizer and its chat template along. The template is a
program in Jinja, so it runs in a sandbox: no attribute that leads to Python's
internals, no change of its arguments, no import, no file.

The lengths of template and output are bounded, and so are the steps of loops,
macros and blocks, the length of a range and the size of a product or power. Not
bounded are the time and memory of one filter or one method on long data
(`'x' | center(10 ** 9)`), nor a text that each step doubles. A template from a
stranger belongs in a process with a memory limit.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import itertools
import json
import operator
import pathlib
from typing import Any

import jinja2
from jinja2 import ext
from jinja2 import nodes
from jinja2 import sandbox
import tokenizers

from nvfp4_jax import files

# Templates in use have up to 30,000 characters and walk a few times over the
# messages.
_MAX_TEMPLATE_BYTES = 1 << 17
_MAX_OUTPUT = 1 << 22
_MAX_STEPS = 100_000
_MAX_BITS = 4096

# Not an identifier, so no template can name it.
_STEPS = '#steps'


class TemplateError(ValueError):
  """A chat template is malformed, leaves its bounds or refuses the messages."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
  """A tokenizer with what a chat needs; made by `load`.

  Attributes:
    backend: maps text to ids; neither truncates nor pads.
    chat_template: Jinja, or None if the checkpoint has none.
    special_tokens: text of special tokens by the name that templates use, such
      as 'bos_token'.
    eos_ids: tokens that end a completion; may be empty.
  """

  backend: tokenizers.Tokenizer
  chat_template: str | None
  special_tokens: Mapping[str, str]
  eos_ids: tuple[int, ...]


def load(folder: pathlib.Path) -> Tokenizer:
  """Returns the tokenizer of a Hugging Face checkpoint.

  Read are tokenizer.json, tokenizer_config.json and, where there,
  chat_template.jinja (goes before the template in tokenizer_config.json),
  generation_config.json and config.json. Of several named templates, 'default'
  is taken. The EOS ids are the union of those in generation_config.json, in
  config.json and the tokenizer's `eos_token`, in this order.

  Args:
    folder: the checkpoint.

  Raises:
    files.CheckpointError: a file is missing or malformed, or an EOS is not in
      the vocabulary.
  """
  text = files.read_text(folder, 'tokenizer.json')
  try:
    backend = tokenizers.Tokenizer.from_str(text)
  except Exception as error:  # The backend raises no narrower class.
    raise files.CheckpointError(
        f"'tokenizer.json' in {folder} is not a tokenizer: {error}"
    ) from error
  # A prompt that was cut, as a training set-up may have saved it, would pass
  # unnoticed.
  backend.no_truncation()
  backend.no_padding()
  config = files.read_json(folder, 'tokenizer_config.json')
  special_tokens = _special_tokens(config)
  return Tokenizer(
      backend=backend,
      chat_template=_chat_template(folder, config),
      special_tokens=special_tokens,
      eos_ids=_eos_ids(folder, backend, special_tokens.get('eos_token')),
  )


def encode(
    tokenizer: Tokenizer, text: str, *, add_special_tokens: bool = False
) -> list[int]:
  """Returns the ids of a text.

  Text that spells a special token becomes that token; so a chat, once rendered,
  is encoded as it is. Keep such text out of the content of strangers.

  Args:
    tokenizer: the tokenizer.
    text: any Unicode text without lone surrogates.
    add_special_tokens: also add what the tokenizer puts around a text, such as
      BOS. A chat template writes these itself.

  Raises:
    ValueError: the text has no UTF-8 form.
  """
  text.encode()  # Raises UnicodeEncodeError.
  return tokenizer.backend.encode(
      text, add_special_tokens=add_special_tokens
  ).ids


def decode(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    skip_special_tokens: bool = True,
) -> str:
  """Returns the text of ids; bytes that are not UTF-8 become U+FFFD.

  Args:
    tokenizer: the tokenizer.
    ids: the tokens.
    skip_special_tokens: leave special tokens, such as EOS, out.

  Raises:
    ValueError: an id has no token. A model may have such ids: its vocabulary is
      often padded.
  """
  for i in ids:
    if not _has_token(tokenizer.backend, i):
      raise ValueError(
          f'{i} is none of the {tokenizer.backend.get_vocab_size()} token ids.'
      )
  return tokenizer.backend.decode(
      list(ids), skip_special_tokens=skip_special_tokens
  )


def render_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    variables: Mapping[str, Any] | None = None,
) -> str:
  """Returns a chat as the text that the model was trained on.

  Args:
    tokenizer: the tokenizer.
    messages: at least one; each a dict with the strings 'role' and 'content',
      and more if the template reads it.
    add_generation_prompt: end with the head of the assistant's next message.
    variables: what the template reads besides, such as 'tools'. A template sees
      the date only if `strftime_now`, a function, is given here.

  Raises:
    TemplateError: there is no template, or it is malformed, leaves its bounds
      or refuses the messages.
    ValueError: a message or a variable's name is not as described.
  """
  if tokenizer.chat_template is None:
    raise TemplateError('The tokenizer has no chat template.')
  _check_messages(messages)
  given: dict[str, Any] = {
      **tokenizer.special_tokens,
      'messages': messages,
      'add_generation_prompt': add_generation_prompt,
  }
  for name in variables or {}:
    if name in given or not name.isidentifier():
      raise ValueError(
          f'The variable {name!r} is not an identifier other than'
          f' {sorted(given)}.'
      )
  given.update(variables or {})
  try:
    template = _compile(tokenizer.chat_template)
    return _render(template, given)
  except TemplateError:
    raise
  except Exception as error:  # A template can raise whatever Python can.
    reason = f'{type(error).__name__}: {error}'[:500]
    raise TemplateError(f'The chat template failed: {reason}') from error


def _special_tokens(config):
  """Returns the special tokens of a tokenizer_config by name."""
  found = {}
  for name, value in config.items():
    if isinstance(value, dict):  # A token with how it is matched in text.
      value = value.get('content')
    if name.endswith('_token') and isinstance(value, str):
      found[name] = value
  return found


def _chat_template(folder, config):
  """Returns the template that a folder means for plain chats, or None."""
  if files.exists(folder, 'chat_template.jinja'):
    return files.read_text(folder, 'chat_template.jinja', _MAX_TEMPLATE_BYTES)
  value = config.get('chat_template')
  if isinstance(value, list) and all(isinstance(v, dict) for v in value):
    named = {str(entry.get('name')): entry.get('template') for entry in value}
    if 'default' not in named:
      raise files.CheckpointError(
          f"None of the chat templates {sorted(named)} is 'default'."
      )
    value = named['default']
  if value is not None and not isinstance(value, str):
    raise files.CheckpointError(
        f"'chat_template' in {folder} is {str(value)[:80]!r}, neither a text"
        ' nor a list of named texts.'
    )
  return value


def _eos_ids(folder, backend, eos_token):
  ids = []
  for name in ('generation_config.json', 'config.json'):
    if files.exists(folder, name):
      value = files.read_json(folder, name).get('eos_token_id')
      value = [] if value is None else value
      ids += value if isinstance(value, list) else [value]
  if eos_token is not None:
    ids.append(backend.token_to_id(eos_token))
  for i in ids:
    if type(i) is not int or not _has_token(backend, i):
      raise files.CheckpointError(
          f'The EOS {eos_token if i is None else i!r} of {folder} is not in the'
          f' vocabulary of {backend.get_vocab_size()} tokens.'
      )
  return tuple(dict.fromkeys(ids))


def _has_token(backend, i):
  return 0 <= i < 1 << 32 and backend.id_to_token(i) is not None


def _check_messages(messages):
  if not isinstance(messages, list | tuple) or not messages:
    raise ValueError(f'{messages!r} is not a list of at least one message.')
  for i, message in enumerate(messages):
    if not isinstance(message, Mapping):
      raise ValueError(f'Message {i} is {message!r}, not a dict.')
    for name in ('role', 'content'):
      if not isinstance(message.get(name), str):
        raise ValueError(
            f'Message {i} has the {name} {message.get(name)!r}, not a string.'
        )


class _Generation(ext.Extension):
  """Lets {% generation %} mark the assistant's text; Jinja wants a class."""

  tags = {'generation'}

  def parse(self, parser):
    """Returns the statements up to the end tag, in a scope of their own."""
    line = next(parser.stream).lineno
    body = parser.parse_statements(('name:endgeneration',), drop_needle=True)
    return nodes.Scope(body, lineno=line)


@functools.lru_cache(maxsize=8)
def _compile(text):
  """Returns the template, compiled, with its steps counted."""
  size = len(text.encode())
  if size > _MAX_TEMPLATE_BYTES:
    raise TemplateError(
        f'The chat template has {size} bytes, more than {_MAX_TEMPLATE_BYTES}.'
    )
  environment = sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=['jinja2.ext.loopcontrols', _Generation],
  )
  environment.filters['tojson'] = _to_json
  del environment.globals['lipsum']  # A text of any length in one call.
  environment.intercepted_binops = frozenset(['*', '**'])
  environment.binop_table.update({'*': _multiply, '**': _power})
  environment.extend(count_step=_count_step)
  tree = environment.parse(text)
  _insert_steps(tree)
  tree.set_environment(environment)
  return environment.from_string(tree, {'raise_exception': _raise_exception})


def _insert_steps(tree):
  """Makes all that can run more than once call `_count_step` each time."""
  # Of the environment, because a template could set a name anew.
  step = lambda line: nodes.Call(
      nodes.EnvironmentAttribute('count_step', lineno=line),
      *([], [], None, None),
      lineno=line,
  )
  kinds = (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)
  for node in list(tree.find_all(kinds)):
    line = node.lineno
    node.body.insert(0, nodes.ExprStmt(step(line), lineno=line))
    if isinstance(node, nodes.For) and node.test is not None:
      node.test = nodes.And(step(line), node.test, lineno=line)


def _render(template, variables):
  chunks, size = [], 0
  for chunk in template.generate({**variables, _STEPS: itertools.count(1)}):
    size += len(chunk)
    if size > _MAX_OUTPUT:
      raise TemplateError(
          f'The chat template wrote more than {_MAX_OUTPUT} characters.'
      )
    chunks.append(chunk)
  return ''.join(chunks)


@jinja2.pass_context
def _count_step(context):
  if next(context[_STEPS]) > _MAX_STEPS:
    raise TemplateError(f'The chat template took more than {_MAX_STEPS} steps.')
  return True


def _multiply(left, right):
  for sequence, times in ((left, right), (right, left)):
    if hasattr(sequence, '__len__') and isinstance(times, int):
      _check_size(len(sequence) * times, _MAX_OUTPUT)
  if isinstance(left, int) and isinstance(right, int):
    _check_size(left.bit_length() + right.bit_length(), _MAX_BITS)
  return operator.mul(left, right)


def _power(base, exponent):
  if isinstance(base, int) and isinstance(exponent, int):
    _check_size(base.bit_length() * exponent, _MAX_BITS)
  return operator.pow(base, exponent)


def _check_size(size, limit):
  if size > limit:
    raise TemplateError(f'A product or power has size {size} above {limit}.')


def _raise_exception(message):
  raise TemplateError(f'The chat template refuses the messages: {message}')


def _to_json(
    value, ensure_ascii=False, indent=None, separators=None, sort_keys=False
):
  """Returns JSON as Hugging Face's templates expect it: no HTML escapes."""
  return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
  )
