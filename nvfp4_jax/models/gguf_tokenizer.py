"""The tokenizer in the metadata of a GGUF file, as Hugging Face files.

GGUF keeps the tokens, the merges and the name of a pre-tokenizer, which cuts a
text into the pieces that merges stay within. What a name stands for is not in
the file: it is here.

Bytes that the vocabulary has no token for are dropped from a text, as by the
tokenizers of these models.
"""

from collections.abc import Mapping
import dataclasses
import json
import pathlib
from typing import Any

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors

from nvfp4_jax import files

# Token types of the format.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

# Contractions; a word with the sign before it; up to three digits; signs; line
# ends; spaces. Llama 3's.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)


@dataclasses.dataclass(frozen=True)
class _Kind:
  """What a pre-tokenizer's name stands for.

  Attributes:
    steps: they cut the text and then map its bytes to characters.
    ignore_merges: a piece that is a token becomes it, whatever the merges.
    add_bos: whether a text gets BOS where the file does not say.
  """

  steps: tuple[Any, ...]
  ignore_merges: bool = False
  add_bos: bool = False


# ByteLevel with its regex is GPT-2's.
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_KINDS = {
    'gpt-2': _Kind((_GPT2,)),
    'llama-bpe': _Kind(
        (pre_tokenizers.Split(tokenizers.Regex(_LLAMA3), 'isolated'), _BYTES),
        ignore_merges=True,
        add_bos=True,
    ),
    'smollm': _Kind((pre_tokenizers.Digits(individual_digits=True), _GPT2)),
}


def write(
    folder: pathlib.Path, metadata: Mapping[str, Any], max_length: int
) -> None:
  """Writes tokenizer.json and tokenizer_config.json.

  Args:
    folder: the checkpoint.
    metadata: of the GGUF file.
    max_length: number of positions of the model.

  Raises:
    files.CheckpointError: the metadata lacks what a tokenizer needs, or is of a
      kind that is not known here.
  """
  tokenizer = _build(metadata)
  files.write_atomically(
      folder / 'tokenizer.json', f'{tokenizer.to_str(pretty=True)}\n'
  )
  files.write_atomically(
      folder / 'tokenizer_config.json',
      json.dumps(_config(metadata, max_length), indent=2) + '\n',
  )


def special_ids(metadata: Mapping[str, Any]) -> dict[str, int | list[int]]:
  """Returns the ids of special tokens by their name in a generation config.

  The EOS ids are a list: end of text, then end of turn and end of message where
  the file has them.

  Raises:
    files.CheckpointError: an id has no token, or there is no end of text.
  """
  eos = [_special_id(metadata, name) for name in ('eos', 'eot', 'eom')]
  if eos[0] is None:
    raise files.CheckpointError("The GGUF file has no EOS ('eos_token_id').")
  ids = {
      'bos_token_id': _special_id(metadata, 'bos'),
      'eos_token_id': list(dict.fromkeys(i for i in eos if i is not None)),
      'pad_token_id': _special_id(metadata, 'padding'),
  }
  return {name: value for name, value in ids.items() if value is not None}


def tokens(metadata: Mapping[str, Any]) -> list[str]:
  """Returns the tokens by id.

  Raises:
    files.CheckpointError: there are none.
  """
  return _array(metadata, 'tokens')


def _build(metadata):
  """Returns the tokenizer of the metadata."""
  kind = _kind(metadata)
  vocabulary = tokens(metadata)
  ids = {token: i for i, token in enumerate(vocabulary)}
  if len(ids) < len(vocabulary):
    twice = next(t for i, t in enumerate(vocabulary) if ids[t] != i)
    raise files.CheckpointError(f'The token {twice!r} has two ids.')
  merges = [_merge(text) for text in _array(metadata, 'merges')]
  added = _added_tokens(metadata, vocabulary)
  try:
    model = models.BPE(ids, merges, ignore_merges=kind.ignore_merges)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(kind.steps))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
  except Exception as error:  # The backend raises no narrower class.
    raise files.CheckpointError(
        f'The GGUF file holds no tokenizer: {error}'
    ) from error
  _add_frame(tokenizer, metadata, kind)
  return tokenizer


def _kind(metadata):
  model = metadata.get('tokenizer.ggml.model')
  if model != 'gpt2':
    raise files.CheckpointError(
        f"The GGUF file has a tokenizer of the model {model!r}, not 'gpt2'"
        ' (byte-level BPE).'
    )
  if metadata.get('tokenizer.ggml.add_space_prefix'):
    raise files.CheckpointError(
        "The GGUF file asks for 'add_space_prefix', which is not supported."
    )
  name = metadata.get('tokenizer.ggml.pre')
  if name not in _KINDS:
    raise files.CheckpointError(
        f'The GGUF file has the pre-tokenizer {name!r}; known are'
        f' {sorted(_KINDS)}.'
    )
  return _KINDS[name]


def _merge(text):
  parts = text.split(' ')
  if len(parts) != 2 or not all(parts):
    raise files.CheckpointError(f'The merge {text!r} is not of two tokens.')
  return parts[0], parts[1]


def _added_tokens(metadata, vocabulary):
  """Returns the tokens that are found in a text before it is cut."""
  types = _array(metadata, 'token_type')
  if len(types) != len(vocabulary):
    raise files.CheckpointError(
        f'The GGUF file has {len(vocabulary)} tokens but {len(types)} types.'
    )
  added = []
  for token, kind in zip(vocabulary, types, strict=True):
    if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
      special = kind != _USER_DEFINED
      added.append(
          tokenizers.AddedToken(token, special=special, normalized=False)
      )
    elif kind not in (_NORMAL, _UNUSED):
      raise files.CheckpointError(f'The token {token!r} has the type {kind!r}.')
  return added


def _add_frame(tokenizer, metadata, kind):
  """Makes the tokenizer put BOS and EOS around a text, where it should."""
  template, special_tokens = ['$A'], []
  for name, default in (('bos', kind.add_bos), ('eos', False)):
    if not metadata.get(f'tokenizer.ggml.add_{name}_token', default):
      continue
    i = _special_id(metadata, name)
    if i is None:
      raise files.CheckpointError(f'The GGUF file adds {name}, but has none.')
    template.insert(0 if name == 'bos' else len(template), name)
    special_tokens.append(
        {'id': name, 'ids': [i], 'tokens': [tokens(metadata)[i]]}
    )
  if special_tokens:
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=special_tokens
    )


def _config(metadata, max_length):
  """Returns tokenizer_config.json."""
  config = {
      'add_prefix_space': False,
      'clean_up_tokenization_spaces': False,
      'model_max_length': max_length,
      'tokenizer_class': 'PreTrainedTokenizerFast',
  }
  names = {'bos': 'bos', 'eos': 'eos', 'pad': 'padding', 'unk': 'unknown'}
  for name, gguf_name in names.items():
    i = _special_id(metadata, gguf_name)
    if i is not None:
      config[f'{name}_token'] = tokens(metadata)[i]
  template = metadata.get('tokenizer.chat_template')
  if template is not None:
    config['chat_template'] = template
  return config


def _special_id(metadata, name):
  """Returns the id of a special token, or None if the file has none."""
  i = metadata.get(f'tokenizer.ggml.{name}_token_id')
  vocabulary = tokens(metadata)
  if i is not None and not 0 <= i < len(vocabulary):
    raise files.CheckpointError(
        f'The {name} token {i} is none of the {len(vocabulary)} tokens.'
    )
  return i


def _array(metadata, name):
  value = metadata.get(f'tokenizer.ggml.{name}')
  if not isinstance(value, list) or not value:
    raise files.CheckpointError(
        f"The GGUF file has no 'tokenizer.ggml.{name}'."
    )
  return value
