"""Checks that this device computes this project's bytes.

    python -m nvfp4_jax.self_check

Compilers and devices differ in what they do to float32 (`exact`), and a cast
that was optimized away makes a quantizer a silent no-op. Primitives are
compared with numpy, quantizers with digests of the right bytes, which
tests/self_check_test.py holds against an independent quantizer in numpy. Takes
a few seconds; experiments call it before they start.
"""

from collections.abc import Callable, Iterator, Mapping
import functools
import hashlib
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from nvfp4_jax import exact
from nvfp4_jax import formats
from nvfp4_jax import kernels
from nvfp4_jax import quantization

_SHAPE = (256, 1024)

# SHA-256 (first 16 digits) of codes, block scales and global scales.
DIGESTS: Mapping[quantization.QuantSpec, tuple[str | None, ...]] = {
    quantization.QuantSpec('nvfp4'): (
        'e743485680bc4d1d',
        '6eb59656fd3204bb',
        'faf15e5781371ded',
    ),
    quantization.QuantSpec('nvfp4', outer='token'): (
        '16208d8eab52862d',
        'a37325591c89910d',
        '68e2a019be8e87a4',
    ),
    quantization.QuantSpec('nvfp4', block_2d=True): (
        '44ef778e105e6f42',
        '7b76d142ffeb2843',
        'faf15e5781371ded',
    ),
    quantization.QuantSpec('nvfp4', outer='token', four_over_six='mse'): (
        'c51f084d09a51869',
        'e6b4112358a60c4d',
        '4f2f119d03ae6081',
    ),
    quantization.QuantSpec('nvfp4', four_over_six='mse'): (
        '686d17b9d243dae8',
        'f87c84029bea78f3',
        'e1e5c19389a09614',
    ),
    quantization.QuantSpec('nvfp4', hadamard=True): (
        '9fac0b37fc2e8a4f',
        '3cec788a656f5dd6',
        'ee3601df896a4b11',
    ),
    quantization.QuantSpec('mxfp8'): (
        '53483daee485a65b',
        '18184f2003eb197b',
        None,
    ),
    quantization.QuantSpec('mxfp4'): (
        '7d06f239dcd92142',
        '4d7a36207d952b16',
        None,
    ),
    quantization.QuantSpec('fp8_block'): (
        '302a332b819b719c',
        '7713f22a2eef4aac',
        None,
    ),
    quantization.QuantSpec('fp8_block', block_2d=True): (
        '7af1b2bf847bd10d',
        'a090112a9f74344d',
        None,
    ),
}


class SelfCheckError(RuntimeError):
  """This device does not compute the right bytes; the message says which."""


def input_matrix() -> np.ndarray:
  """Returns the bfloat16 matrix of the checks, made by integer arithmetic.

  Exponents differ by up to 12 within a block and by 20 more between rows.
  """
  rows, columns = _SHAPE
  index = np.arange(rows * columns, dtype=np.uint32).reshape(_SHAPE)
  mixed = index * np.uint32(2654435761)  # Knuth's multiplicative hash
  mixed = (mixed ^ (mixed >> 15)) * np.uint32(2246822519)
  mixed ^= mixed >> 13
  sign, mantissa = mixed >> 31, mixed & 0x7F
  row = np.arange(rows, dtype=np.uint32)[:, None]
  exponent = 110 + (mixed >> 8) % 13 + (row * 7) % 21
  bits = (sign << 15) | (exponent << 7) | mantissa
  return bits.astype(np.uint16).view(ml_dtypes.bfloat16)


def digest(array: np.typing.ArrayLike) -> str:
  """Returns the first 16 digits of the SHA-256 of an array's bytes."""
  data = np.ascontiguousarray(np.asarray(array)).tobytes()
  return hashlib.sha256(data).hexdigest()[:16]


def check() -> None:
  """Raises SelfCheckError with the first rule that this device breaks."""
  for rule, fault in faults():
    raise SelfCheckError(
        f'On {jax.devices()[0].device_kind} ({jax.default_backend()}), {rule}:'
        f' {fault}. Quantized bytes would be wrong here.'
    )


def faults() -> Iterator[tuple[str, str]]:
  """Yields every broken rule, primitives first, and what is wrong."""
  x = input_matrix()
  for rule, got, want in _primitives(x.astype(np.float32)):
    differ = int(np.sum(got != want))
    if differ:
      yield rule, f'{differ} of {want.size} results differ'
  x = jnp.asarray(x)
  if jax.default_backend() == 'cpu':  # a GPU grants it to NVFP4 alone
    yield from _rows_that_differ(x)
  for spec, want in DIGESTS.items():
    for implementation in kernels.implementations(x, spec):
      q = _quantize(x, spec, implementation)
      arrays = (q.data, q.block_scale, q.global_scale)
      names = ('element codes', 'block scales', 'global scales')
      for name, array, digits in zip(names, arrays, want, strict=True):
        if (None if array is None else digest(array)) != digits:
          yield f'{implementation} quantize with {spec}', f'wrong {name}'


def _primitives(x) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
  """Yields a rule, this device's results and numpy's, as bits."""
  a, b = x[:, ::2], x[:, 1::2]
  small = np.clip(a * np.float32(2.0**8), -500, 500)
  bf16 = ml_dtypes.bfloat16
  rules: list[tuple[str, Callable, np.ndarray]] = [
      ('exact.divide rounds once', lambda a, b, s: exact.divide(a, b), a / b),
      (
          'exact.multiply rounds once, before a sum',
          lambda a, b, s: exact.multiply(a, s) + b,
          a * small + b,
      ),
      (
          'exact.to_bfloat16 rounds, also before a cast back',
          lambda a, b, s: exact.to_bfloat16(a * s).astype(jnp.float32),
          (a * small).astype(bf16).astype(np.float32),
      ),
      (
          'formats.encode_e4m3 rounds to nearest even and saturates',
          lambda a, b, s: formats.decode_e4m3(formats.encode_e4m3(s)),
          np.clip(small, -448, 448)
          .astype(ml_dtypes.float8_e4m3fn)
          .astype(np.float32),
      ),
      (
          'formats.encode_e2m1 rounds to nearest even and saturates',
          lambda a, b, s: jnp.abs(formats.decode_e2m1(formats.encode_e2m1(s))),
          np.abs(small.astype(ml_dtypes.float4_e2m1fn).astype(np.float32)),
      ),
  ]
  compute = jax.jit(lambda *args: [fn(*args) for _, fn, _ in rules])
  for (rule, _, want), got in zip(rules, compute(a, b, small), strict=True):
    yield rule, np.asarray(got).view(np.uint32), want.view(np.uint32)


def _rows_that_differ(x) -> Iterator[tuple[str, str]]:
  """Yields numbers of rows that change a row's bits in a bfloat16 matmul.

  With them, log-probs of learner and sampler would differ.
  """
  x, w = x[:80, :256], x[:, 256:512]
  product = jax.jit(kernels.matmul)
  whole = np.asarray(product(x, w)).view(np.uint32)
  for rows in (1, 2, 7, 17, 33, 65):
    part = np.asarray(product(x[:rows], w)).view(np.uint32)
    differ = int(np.sum(part != whole[:rows]))
    if differ:
      rule = "a matmul's rows do not depend on how many there are"
      yield rule, f'{differ} of {part.size} results of {rows} rows differ'


@functools.partial(jax.jit, static_argnums=(1, 2))
def _quantize(x, spec, implementation):
  return kernels.quantize(x, spec, implementation=implementation)


def main() -> int:
  """Prints every broken rule; returns 1 if there is one."""
  found = [f'{rule}: {fault}' for rule, fault in faults()]
  device = f'{jax.devices()[0].device_kind} ({jax.default_backend()})'
  for line in found:
    print(f'WRONG  {line}')
  verdict = f'{len(found)} rules are broken' if found else 'all bytes are right'
  print(f'{device}: {verdict}')
  return 1 if found else 0


if __name__ == '__main__':
  sys.exit(main())
