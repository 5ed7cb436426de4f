"""Tensors in the safetensors format: exact bytes in, exact bytes out.

A file is eight bytes with the length of the header, little-endian; the header,
JSON that gives each tensor's dtype, shape and range of bytes; the tensors in
row-major order. A whole header is checked before a tensor is read, so a damaged
file is one `files.CheckpointError`. A flipped bit of a tensor is not seen here:
`files.check_manifest` sees it.

float4 arrays have a byte for each value in memory and two values a byte in the
file, the even index in the low half.

Reference: https://github.com/huggingface/safetensors#format
"""

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
import json
import math
import os
import pathlib
from typing import Any

import ml_dtypes
import numpy as np

from nvfp4_jax import files

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'

# In the order of the official writer, which puts tensors of the last dtype
# first: then each tensor's offset is a multiple of its item size.
_DTYPES = {
    name: np.dtype(dtype)
    for name, dtype in {
        'BOOL': np.bool_,
        'F4': ml_dtypes.float4_e2m1fn,
        'U8': np.uint8,
        'I8': np.int8,
        'F8_E5M2': ml_dtypes.float8_e5m2,
        'F8_E4M3': ml_dtypes.float8_e4m3fn,
        'F8_E8M0': ml_dtypes.float8_e8m0fnu,
        'I16': np.int16,
        'U16': np.uint16,
        'F16': np.float16,
        'BF16': ml_dtypes.bfloat16,
        'I32': np.int32,
        'U32': np.uint32,
        'F32': np.float32,
        'F64': np.float64,
        'I64': np.int64,
        'U64': np.uint64,
    }.items()
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_BOOL, _F4 = _DTYPES['BOOL'], _DTYPES['F4']

_METADATA = '__metadata__'
_MAX_HEADER_BYTES = 100_000_000  # The official reader's limit.
_MAX_AXES = 64  # numpy's limit.
_MAX_BYTES = 2**63 - 1  # numpy's limit, where axes of size 0 count as 1.
_PICKLES = frozenset({'.bin', '.ckpt', '.pickle', '.pkl', '.pt', '.pth'})


@dataclasses.dataclass(frozen=True)
class TensorInfo:
  """Where a tensor lies.

  Attributes:
    path: its file.
    dtype: of the array that `read_tensor` returns.
    shape: likewise.
    start: offset of its first byte in the file.
    end: offset behind its last byte.
  """

  path: pathlib.Path
  dtype: np.dtype
  shape: tuple[int, ...]
  start: int
  end: int


def read_header(path: pathlib.Path) -> dict[str, TensorInfo]:
  """Returns the tensors of a file by name, in the order of their bytes.

  Raises:
    files.CheckpointError: the file is missing, cut short or otherwise not what
      the format says. The tensors' ranges cover the data without a gap and
      without overlap, and their sizes are those of their dtypes and shapes.
  """
  header, data_start, file_bytes = _read_header_json(path)
  metadata = header.pop(_METADATA, {})
  if not isinstance(metadata, dict) or not all(
      isinstance(value, str) for value in metadata.values()
  ):
    raise files.CheckpointError(f'{path}: {_METADATA} must hold strings.')
  infos = {
      name: _tensor_info(f'{path}: tensor {name!r}', path, entry, data_start)
      for name, entry in header.items()
  }
  infos = dict(sorted(infos.items(), key=lambda x: (x[1].start, x[1].end)))
  end = data_start
  for name, info in infos.items():
    if info.start != end:
      raise files.CheckpointError(
          f'{path}: tensor {name!r} begins at byte {info.start}, but the one'
          f' before it ends at {end}.'
      )
    end = info.end
  if end != file_bytes:
    raise files.CheckpointError(
        f'{path} has {file_bytes} bytes, but its tensors end at {end}.'
    )
  return infos


def read_index(folder: pathlib.Path) -> dict[str, TensorInfo]:
  """Returns the tensors of a checkpoint folder by name.

  They are those of the shards that `model.safetensors.index.json` names or,
  without an index, of `model.safetensors`. The index must name every tensor of
  its shards. With an index, a `model.safetensors` that is none of its shards is
  an error: one of the two is left over from another save, and nothing says
  which.

  Raises:
    files.CheckpointError: there is neither, or something does not fit.
  """
  if not files.exists(folder, INDEX):
    if not files.exists(folder, SINGLE):
      raise files.CheckpointError(_nothing_to_read(folder))
    return read_header(files.resolve(folder, SINGLE))
  shards = _read_weight_map(folder)
  if SINGLE not in shards and files.exists(folder, SINGLE):
    raise files.CheckpointError(
        f'{folder} has {SINGLE!r} and, without it, {INDEX!r}: remove one.'
    )
  infos = {}
  for shard, names in shards.items():
    header = read_header(files.resolve(folder, shard))
    if lost := sorted(names - set(header)):
      raise files.CheckpointError(
          f'The index maps tensor {lost[0]!r} to {shard!r} in {folder}, which'
          ' lacks it.'
      )
    if extra := sorted(set(header) - names):
      raise files.CheckpointError(
          f'{shard!r} in {folder} holds tensor {extra[0]!r}, which the index'
          ' does not map to it.'
      )
    infos |= header
  return infos


def read_tensor(info: TensorInfo) -> np.ndarray:
  """Returns the tensor: writable, row-major, of exactly the file's bytes.

  Raises:
    files.CheckpointError: the file is gone or shorter than when its header was
      read, or a boolean is neither 0 nor 1.
  """
  array = np.empty(info.shape, info.dtype)
  values = array.reshape(-1).view(np.uint8)
  if info.dtype == _F4:
    packed = np.empty(info.end - info.start, np.uint8)
    _read_into(packed, info)
    values[0::2] = packed & 0xF
    values[1::2] = packed >> 4
    return array
  _read_into(values, info)
  if info.dtype == _BOOL and np.any(values > 1):
    raise files.CheckpointError(
        f'{info.path}: a boolean in bytes {info.start} to {info.end} is neither'
        ' 0 nor 1.'
    )
  return array


def write_file(
    path: pathlib.Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, str] | None = None,
) -> str:
  """Writes a file that the official reader reads; whole or not at all.

  The bytes are those of the official writer. One tensor at a time is copied to
  the host and made row-major and little-endian.

  Args:
    path: the file; one that is there is replaced.
    tensors: numpy or JAX arrays by name, of any layout. float4 arrays have an
      even last axis.
    metadata: strings for the header, sorted.

  Returns:
    The SHA-256 of the file in hexadecimal.

  Raises:
    TypeError: a dtype has no place in the format, or metadata is no string.
    ValueError: a float4 array has an odd last axis, or the header gets too
      large or has a name that is reserved or has no UTF-8 form.
  """
  header, ordered = _header(tensors, metadata)
  digest = hashlib.sha256()
  with files.open_atomically(path) as file:
    for data in _chunks(header, ordered):
      digest.update(data)
      file.write(data)
  return digest.hexdigest()


def _read_header_json(path):
  """Returns the header, where the tensors begin, and the size of the file."""
  if not path.is_file():  # To open a pipe would wait for its writer.
    raise files.CheckpointError(f'{path} is not a regular file.')
  with path.open('rb') as file:
    file_bytes = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), 'little')
    if file_bytes < 8 or length > min(file_bytes - 8, _MAX_HEADER_BYTES):
      raise files.CheckpointError(
          f'{path} has {file_bytes} bytes: too few for its header, or the'
          f' header has more than {_MAX_HEADER_BYTES}.'
      )
    data = file.read(length)
  if len(data) != length or not data.startswith(b'{'):
    raise files.CheckpointError(f'The header of {path} is not a JSON object.')
  try:
    text = data.decode()
  except UnicodeDecodeError as error:
    raise files.CheckpointError(
        f'The header of {path} is not UTF-8.'
    ) from error
  header = files.parse_json(text, f'The header of {path}')
  return header, 8 + length, file_bytes


def _tensor_info(where, path, entry, data_start):
  """Returns the TensorInfo of a header's entry; `where` names it in errors."""
  if not isinstance(entry, dict) or set(entry) != {
      'dtype',
      'shape',
      'data_offsets',
  }:
    raise files.CheckpointError(
        f'{where} must have dtype, shape and data_offsets, and no more.'
    )
  dtype, shape, offsets = entry['dtype'], entry['shape'], entry['data_offsets']
  if not isinstance(dtype, str) or dtype not in _DTYPES:
    raise files.CheckpointError(
        f'{where} has the dtype {dtype!r:.80}; known are {", ".join(_DTYPES)}.'
    )
  if not _are_sizes(offsets) or len(offsets) != 2:
    raise files.CheckpointError(f'{where} has data_offsets {offsets!r:.80}.')
  if not _are_sizes(shape) or len(shape) > _MAX_AXES:
    raise files.CheckpointError(f'{where} has the shape {shape!r:.80}.')
  try:
    size = _byte_size(where, shape, _DTYPES[dtype])
  except ValueError as error:
    raise files.CheckpointError(*error.args) from error
  start, end = (data_start + offset for offset in offsets)
  if end - start != size:
    raise files.CheckpointError(
        f'{where} has bytes {start} to {end}, but {dtype} of the shape'
        f' {shape} takes {size}.'
    )
  return TensorInfo(path, _DTYPES[dtype], tuple(shape), start, end)


def _are_sizes(value):
  return isinstance(value, list) and all(
      type(size) is int and 0 <= size <= _MAX_BYTES for size in value
  )


def _byte_size(where, shape, dtype):
  """Returns how many bytes the tensor takes in a file."""
  if math.prod(max(n, 1) for n in shape) * dtype.itemsize > _MAX_BYTES:
    raise ValueError(f'{where} has too large a shape, {shape}.')
  size = math.prod(shape) * dtype.itemsize
  if dtype != _F4:
    return size
  if not shape or shape[-1] % 2:
    raise ValueError(
        f'{where} is F4 of the shape {shape}; its last axis must be even.'
    )
  return size // 2


def _read_into(buffer, info):
  """Fills the uint8 buffer with the tensor's bytes."""
  try:
    with info.path.open('rb') as file:
      file.seek(info.start)
      count = file.readinto(buffer.data)
  except FileNotFoundError as error:
    raise files.CheckpointError(f'{info.path} is gone.') from error
  if count != buffer.size:
    raise files.CheckpointError(
        f'{info.path} ends before byte {info.end}: it was cut short.'
    )


def _read_weight_map(folder):
  """Returns the names of the tensors that the index maps to each shard."""
  weight_map = files.read_json(folder, INDEX).get('weight_map')
  if not isinstance(weight_map, dict) or not weight_map:
    raise files.CheckpointError(f'{INDEX!r} in {folder} maps no tensor.')
  shards = {}
  for name, shard in weight_map.items():
    if not isinstance(shard, str) or not shard.endswith('.safetensors'):
      raise files.CheckpointError(
          f'{INDEX!r} in {folder} maps tensor {name!r} to {shard!r}, which is'
          ' not a .safetensors file.'
      )
    shards.setdefault(shard, set()).add(name)
  return shards


def _nothing_to_read(folder):
  """Returns why a folder without safetensors cannot be read."""
  if not folder.is_dir():
    return f'{folder} is not a folder.'
  message = f'{folder} has neither {SINGLE!r} nor {INDEX!r}.'
  pickles = sorted(
      path.name for path in folder.iterdir() if path.suffix in _PICKLES
  )
  if pickles:
    message += (
        f' Pickles such as {pickles[0]!r} are never read, for they run code:'
        ' convert them first.'
    )
  return message


def _header(tensors, metadata):
  """Returns the bytes before the tensors, and the tensors in their order."""
  header: dict[str, Any] = {}
  if metadata is not None:
    header[_METADATA] = dict(sorted(metadata.items()))
    for key, value in metadata.items():
      if not isinstance(key, str) or not isinstance(value, str):
        raise TypeError(f'Metadata {key!r}: {value!r} is not of strings.')
  dtypes = {name: _dtype_name(name, x.dtype) for name, x in tensors.items()}
  rank = {dtype: i for i, dtype in enumerate(_DTYPES)}
  end, ordered = 0, []
  for name in sorted(dtypes, key=lambda name: (-rank[dtypes[name]], name)):
    if name == _METADATA:
      raise ValueError(f'{_METADATA!r} cannot be the name of a tensor.')
    dtype, shape = dtypes[name], list(tensors[name].shape)
    start = end
    end += _byte_size(f'tensor {name!r}', shape, _DTYPES[dtype])
    header[name] = {
        'dtype': dtype,
        'shape': shape,
        'data_offsets': [start, end],
    }
    ordered.append(tensors[name])
  data = json.dumps(header, ensure_ascii=False, separators=(',', ':')).encode()
  data += b' ' * (-len(data) % 8)
  if len(data) > _MAX_HEADER_BYTES:
    raise ValueError(f'The header has more than {_MAX_HEADER_BYTES} bytes.')
  return len(data).to_bytes(8, 'little') + data, ordered


def _dtype_name(name, dtype):
  # Extended JAX dtypes, of keys, are not numpy's.
  plain = dtype.newbyteorder('=') if isinstance(dtype, np.dtype) else None
  if plain not in _NAMES:
    raise TypeError(
        f'Tensor {name!r} has the dtype {dtype}, which the format lacks; known'
        f' are {", ".join(_DTYPES)}.'
    )
  return _NAMES[plain]


def _chunks(header, ordered) -> Iterator[bytes | memoryview]:
  """Yields the bytes of a file."""
  yield header
  for tensor in ordered:
    array = np.asarray(tensor)
    array = array.astype(array.dtype.newbyteorder('<'), order='C', copy=False)
    values = array.reshape(-1).view(np.uint8)
    if array.dtype == _F4:  # Only the low half of its byte is the value.
      values = (values[0::2] & 0xF) | (values[1::2] << 4)
    yield values.data
