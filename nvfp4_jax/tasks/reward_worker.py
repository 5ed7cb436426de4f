"""The process of a `rewards.Pool`: rewards one completion at a time.

It talks to the pool through a socket: says 'hello', gets the pickled reward
function, says 'ready' or 'failed', then answers every (problem, completion)
with (kind, reward, reason, seconds). It ends when the socket does.
"""

from collections.abc import Callable
import faulthandler
import math
from multiprocessing import connection
import os
import pickle
import time
from typing import Any

_MAX_REASON = 500  # characters

type Outcome = tuple[str, float | None, str]


def run(
    reward: Callable[[Any, Any], float], problem: Any, completion: Any
) -> Outcome:
  """Returns (kind of failure or '', reward or None, reason) of one call."""
  number = float(reward(problem, completion))
  if not math.isfinite(number):
    return 'not_finite', None, f'the reward is {number}'
  return '', number, ''


def failure(error: BaseException) -> Outcome:
  """Returns the outcome of a call that raised."""
  kind = type(error).__name__
  return kind, None, f'{kind}: {error}'[:_MAX_REASON]


def main(descriptor: int, limit: float) -> None:
  """Serves the pool at the other end of a socket.

  Args:
    descriptor: of the socket.
    limit: seconds after which the process ends itself, even out of a call that
      never returns. A pool that is still there has killed it before.
  """
  pool = connection.Connection(descriptor)
  try:
    pool.send('hello')
    try:
      reward = pickle.loads(pool.recv_bytes())
    except BaseException as error:
      pool.send(('failed', failure(error)[2]))
      return
    pool.send(('ready', ''))
    with open(os.devnull, 'w') as null:
      while True:
        problem, completion = pool.recv()
        faulthandler.dump_traceback_later(limit, exit=True, file=null)
        pool.send(_timed(reward, problem, completion))
        faulthandler.cancel_dump_traceback_later()
  except (EOFError, OSError):
    return  # The pool is closed.


def _timed(reward, problem, completion):
  start = time.perf_counter()
  try:
    outcome = run(reward, problem, completion)
  except BaseException as error:  # SystemExit too is an answer.
    outcome = failure(error)
  return (*outcome, time.perf_counter() - start)
