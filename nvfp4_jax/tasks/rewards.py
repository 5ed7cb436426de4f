"""Rewards of many completions, each with what became of it.

A reward that failed is no reward of 0: it would teach that an answer is wrong
that nobody has judged. So it is None, with a status and a reason, and whoever
trains leaves the completion out.

`score` runs in the calling thread, as is right for rewards that compare two
strings. A reward that may hang or crash, such as one that runs an algebra
system, belongs in a `Pool`. Its workers are processes: a thread that hangs can
be neither ended nor, at the interpreter's exit, left behind, and a regular
expression that runs wild holds the lock that all threads need. They are started
as fresh interpreters, since a fork of a process in which JAX runs can deadlock.
They are no sandbox: they have the rights of the process that starts them.
"""

import collections
from collections.abc import Iterable, Sequence
import contextlib
import dataclasses
from multiprocessing import connection
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from typing import Any, Literal
import weakref

from nvfp4_jax.tasks import reward_worker
from nvfp4_jax.tasks import text

_START_TIMEOUT = 120.0  # seconds; imports on a busy machine
_TRANSFER_TIMEOUT = 10  # seconds
_ORPHAN_GRACE = 5.0  # seconds that a worker outlives its timeout without a pool
_MAX_LOST = 10  # workers of one batch that died while they had nothing to do

type Item = tuple[Any, Any]  # a problem, and a completion of it


@dataclasses.dataclass(frozen=True)
class Result:
  """What became of one completion's reward.

  Attributes:
    status: 'ok' or why there is no reward: 'timeout' or 'error'.
    reward: finite; None unless ok.
    kind: empty if ok; else 'timeout', the name of the exception that was
      raised, 'not_finite', or 'died' if the worker did.
    reason: the same in words.
    seconds: that it took.
  """

  status: Literal['ok', 'timeout', 'error']
  reward: float | None
  kind: str = ''
  reason: str = ''
  seconds: float = 0.0


def score(reward: text.Reward, items: Iterable[Item]) -> list[Result]:
  """Returns the results of (problem, completion) pairs, in their order.

  Runs in this thread. An exception is an 'error', a call that does not return
  is waited for.
  """
  results = []
  for problem, completion in items:
    start = time.perf_counter()
    try:
      outcome = reward_worker.run(reward, problem, completion)
    except Exception as error:
      outcome = reward_worker.failure(error)
    results.append(_result(*outcome, time.perf_counter() - start))
  return results


def failures(results: Iterable[Result]) -> dict[str, int]:
  """Returns how many results failed, by kind."""
  kinds = (result.kind for result in results if result.status != 'ok')
  return dict(collections.Counter(kinds))


class Pool:
  """Processes that reward completions, each within a time.

      with rewards.Pool(task.reward, workers=4, timeout=10.0) as pool:
        results = pool.score(items)

  A worker that passes the time is killed with all that it started, and another
  takes its place. One batch is scored at a time; other threads wait.
  """

  def __init__(
      self, reward: text.Reward, *, workers: int = 2, timeout: float = 10.0
  ):
    """Makes a pool; processes start with the first batch.

    Args:
      reward: can be pickled: a function of a module, a method of a task or a
        `functools.partial` of one. What a notebook or script defines itself
        cannot, since a worker does not run it.
      workers: how many processes.
      timeout: seconds for one completion.

    Raises:
      ValueError: an argument is not as described.
    """
    if workers < 1:
      raise ValueError(f'workers {workers} is below 1.')
    if not 0 < timeout < float('inf'):
      raise ValueError(f'timeout {timeout} is not positive and finite.')
    try:
      self._reward = pickle.dumps(reward)
    except Exception as error:  # pickle raises many.
      raise ValueError(f'{reward!r} cannot be pickled: {error}') from error
    self._count = workers
    self._timeout = timeout
    self._lock = threading.Lock()
    self._workers: list[_Worker] = []
    # Also runs when the interpreter exits.
    self._stop = weakref.finalize(self, _stop_all, self._workers)

  def __enter__(self) -> 'Pool':
    return self

  def __exit__(self, *exception) -> None:
    self.close()

  def close(self) -> None:
    """Ends the workers; the pool cannot be used any more."""
    with self._lock:
      self._stop()

  def score(self, items: Sequence[Item]) -> list[Result]:
    """Returns the results of (problem, completion) pairs, in their order.

    Raises:
      RuntimeError: the pool is closed, or workers do not start or live.
    """
    with self._lock:
      if not self._stop.alive:
        raise RuntimeError('The pool is closed.')
      try:
        return self._score(items)
      except BaseException:  # Workers may still be busy with this batch.
        _stop_all(self._workers)
        raise

  def _score(self, items):
    pending = collections.deque(range(len(items)))
    results: dict[int, Result] = {}
    lost = 0
    while len(results) < len(items):
      busy = sum(worker.index is not None for worker in self._workers)
      while len(self._workers) < min(self._count, len(pending) + busy):
        self._workers.append(_Worker(self._timeout))
      for worker in list(self._workers):
        if worker.is_idle and pending:
          index = pending.popleft()
          if not worker.send(index, items[index]):
            pending.appendleft(index)
            lost += 1
            self._drop(worker)
      if lost > _MAX_LOST:
        raise RuntimeError('Reward workers die while they have nothing to do.')
      for worker in self._ready():
        index = worker.index
        result = worker.advance(self._reward)
        if index is not None and result is not None:
          results[index] = result
        if not worker.lives:
          self._drop(worker)
    return [results[index] for index in range(len(items))]

  def _ready(self):
    """Waits until workers have something to say or pass their time."""
    waiting = [worker for worker in self._workers if not worker.is_idle]
    if not waiting:
      return []
    rest = min(worker.deadline for worker in waiting) - time.monotonic()
    spoken = connection.wait(
        [worker.pool_end for worker in waiting], max(rest, 0.0)
    )
    now = time.monotonic()
    return [
        worker
        for worker in waiting
        if worker.pool_end in spoken or worker.deadline <= now
    ]

  def _drop(self, worker):
    worker.stop()
    with contextlib.suppress(ValueError):  # The interpreter exits.
      self._workers.remove(worker)


class _Worker:
  """A process and what it is doing.

  Attributes:
    pool_end: the connection to it.
    index: of the item that it works on, or None.
    deadline: when it is to be given up, if it is not idle.
    is_idle: it waits for an item.
    lives: it can be used further.
  """

  def __init__(self, timeout: float):
    ours, theirs = socket.socketpair()
    with theirs:
      code = (
          f'import sys; sys.path[:] = {sys.path!r};'
          ' from nvfp4_jax.tasks import reward_worker;'
          f' reward_worker.main({theirs.fileno()}, {timeout + _ORPHAN_GRACE!r})'
      )
      self._process = subprocess.Popen(
          [sys.executable, '-c', code],
          stdin=subprocess.DEVNULL,
          pass_fds=(theirs.fileno(),),
          start_new_session=True,  # To kill what a reward starts along with it.
      )
    # A worker that stops reading must not stop the pool.
    limit = struct.pack('ll', _TRANSFER_TIMEOUT, 0)
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
      ours.setsockopt(socket.SOL_SOCKET, option, limit)
    self.pool_end = connection.Connection(ours.detach())
    self.index: int | None = None
    self.deadline = time.monotonic() + _START_TIMEOUT
    self.is_idle = False
    self.lives = True
    self._timeout = timeout

  def send(self, index: int, item: Item) -> bool:
    """Gives it an item; returns False if it is dead."""
    try:
      self.pool_end.send(item)
    except OSError:
      return False
    self.index, self.is_idle = index, False
    self.deadline = time.monotonic() + self._timeout
    return True

  def advance(self, reward: bytes) -> Result | None:
    """Takes what it says, or gives it up; returns the result of its item."""
    try:
      said = self.pool_end.recv() if self.pool_end.poll() else None
      if said == 'hello':
        self.pool_end.send_bytes(reward)
        # It may have waited for this since another batch.
        self.deadline = time.monotonic() + _START_TIMEOUT
        return None
    except (EOFError, OSError):
      said = 'died'
    if self.index is not None:
      return self._finish(said)
    if said is None:
      said = ('failed', f'not ready within {_START_TIMEOUT} s')
    elif said == 'died':
      said = ('failed', 'it died; its own message is on stderr')
    if said[0] == 'failed':
      raise RuntimeError(f'A reward worker does not start: {said[1]}')
    self.is_idle = True
    return None

  def stop(self) -> None:
    """Kills it and the processes that it started."""
    self.lives = False
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
      self._process.wait(_TRANSFER_TIMEOUT)
    self.pool_end.close()

  def _finish(self, said):
    self.index = None
    if said is None:
      self.lives = False
      reason = f'no reward within {self._timeout} s'
      return Result('timeout', None, 'timeout', reason, self._timeout)
    if said == 'died':
      self.lives = False
      return Result('error', None, 'died', 'the worker died')
    self.is_idle = True
    return _result(*said)


def _result(kind, reward, reason, seconds):
  status = 'error' if kind else 'ok'
  return Result(status, reward, kind, reason, seconds)


def _stop_all(workers):
  while workers:
    workers.pop().stop()
