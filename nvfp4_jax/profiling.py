"""What a program takes: seconds and bytes."""

from collections.abc import Callable
import dataclasses
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class Cost:
  """What one call of a compiled program takes.

  Attributes:
    seconds: median of the calls.
    fastest: seconds of the fastest call.
    compile_seconds: tracing and compiling it.
    argument_bytes: of its arguments.
    output_bytes: of its results, those that reuse an argument's memory too.
    temporary_bytes: the most that it needs besides.
  """

  seconds: float
  fastest: float
  compile_seconds: float
  argument_bytes: int
  output_bytes: int
  temporary_bytes: int


def measure(
    fn: Callable[..., Any],
    *args: Any,
    repeats: int = 5,
    donate: tuple[int, ...] = (),
) -> tuple[Any, Cost]:
  """Compiles a function and measures calls of it, each awaited.

  Args:
    fn: of arrays only; what is static is bound already.
    *args: its arguments.
    repeats: calls that are timed, after one that is not.
    donate: indices of arguments whose memory it may reuse; they are copied for
      each call, before the clock starts.

  Returns:
    The result of the last call, and the cost.

  Raises:
    ValueError: repeats is below 1.
    RuntimeError: the backend does not say what memory a program takes.
  """
  if repeats < 1:
    raise ValueError(f'repeats {repeats} is below 1.')
  start = time.perf_counter()
  compiled = jax.jit(fn, donate_argnums=donate).lower(*args).compile()
  compile_seconds = time.perf_counter() - start
  result, seconds = None, []
  for _ in range(repeats + 1):
    given = [
        jax.tree.map(jnp.copy, arg) if i in donate else arg
        for i, arg in enumerate(args)
    ]
    jax.block_until_ready(given)
    start = time.perf_counter()
    result = jax.block_until_ready(compiled(*given))
    seconds.append(time.perf_counter() - start)
  memory = compiled.memory_analysis()
  if memory is None:
    raise RuntimeError('This backend does not say what memory a program takes.')
  return result, Cost(
      seconds=statistics.median(seconds[1:]),
      fastest=min(seconds[1:]),
      compile_seconds=compile_seconds,
      argument_bytes=memory.argument_size_in_bytes,
      output_bytes=memory.output_size_in_bytes,
      temporary_bytes=memory.temp_size_in_bytes,
  )
