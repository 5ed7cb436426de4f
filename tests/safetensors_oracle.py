"""The official safetensors package, as the oracle of our reader and writer."""

import ml_dtypes
import numpy as np
import safetensors

DTYPES = {
    'BOOL': np.bool_,
    'U8': np.uint8,
    'I8': np.int8,
    'U16': np.uint16,
    'I16': np.int16,
    'U32': np.uint32,
    'I32': np.int32,
    'U64': np.uint64,
    'I64': np.int64,
    'F16': np.float16,
    'BF16': ml_dtypes.bfloat16,
    'F32': np.float32,
    'F64': np.float64,
    'F8_E4M3': ml_dtypes.float8_e4m3fn,
    'F8_E5M2': ml_dtypes.float8_e5m2,
    'F8_E8M0': ml_dtypes.float8_e8m0fnu,
    'F4': ml_dtypes.float4_e2m1fn,
}


def random_array(name, shape):
  """Returns an array of random bits: NaN payloads and subnormals occur."""
  dtype = np.dtype(DTYPES[name])
  size = int(np.prod(shape)) * dtype.itemsize
  codes = {'BOOL': 2, 'F4': 16}.get(name, 256)
  data = np.random.default_rng(0).integers(0, codes, size, dtype=np.uint8)
  return data.view(dtype).reshape(shape)


def packed(array):
  """Returns the array as it stands in a file."""
  if array.dtype != ml_dtypes.float4_e2m1fn:
    return array
  low, high = array.view(np.uint8).reshape(-1, 2).T
  return low + 16 * high


def dtype_name(dtype):
  """Returns the format's name of a dtype."""
  return next(name for name, d in DTYPES.items() if np.dtype(d) == dtype)


def read(data):
  """Returns {name: (dtype, shape, bytes)}, or None if a file is refused."""
  try:
    tensors = safetensors.deserialize(data)
  except safetensors.SafetensorError:
    return None
  return {
      name: (x['dtype'], tuple(x['shape']), bytes(x['data']))
      for name, x in tensors
  }


def write(tensors, metadata=None):
  """Returns the bytes of a file that the official package writes."""
  specs, alive = {}, []
  for name, array in tensors.items():
    data, shape, dtype = packed(array), array.shape, array.dtype.name
    alive.append(data)  # A spec holds an address only.
    if array.dtype == ml_dtypes.float4_e2m1fn:  # Its shape is that of bytes.
      dtype, shape = 'float4_e2m1fn_x2', (*shape[:-1], shape[-1] // 2)
    specs[name] = safetensors.TensorSpec(
        dtype=dtype,
        shape=shape,
        data_ptr=data.ctypes.data,
        data_len=data.nbytes,
    )
  return bytes(safetensors.serialize(specs, metadata))
