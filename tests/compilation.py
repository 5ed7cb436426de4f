"""Programs that are compiled in about half the time.

Only LLVM's optimizations are left out: XLA's passes, and with them the buffers
of a program, are those of users. Bits may differ where LLVM fuses roundings.
"""

from collections.abc import Generator
import contextlib

import jax

_FLAG = 'jax_disable_most_optimizations'


@contextlib.contextmanager
def quick() -> Generator[None]:
  """Leaves out most optimizations of what is compiled within."""
  jax.config.update(_FLAG, True)
  try:
    yield
  finally:
    jax.config.update(_FLAG, False)
