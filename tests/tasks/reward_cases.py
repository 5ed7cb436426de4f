"""Reward functions that misbehave on request; workers import this module."""

import os
import pathlib
import re
import subprocess
import sys
import time
from typing import Any

_HOURS = 10_000


class Unpicklable:
  """A reward that no worker can be given."""

  def __call__(self, problem: Any, completion: str) -> float:
    return 0.0

  def __reduce__(self):
    raise TypeError('no')


def obey(problem: Any, completion: str) -> Any:
  """Does what the completion says."""
  verb, _, argument = completion.partition(' ')
  return _VERBS[verb](argument)


def add(problem: Any, completion: str) -> float:
  """Returns a reward that depends on both."""
  return float(problem.answer) + float(completion)


class StartsNever:
  """A reward that cannot be made in a worker."""

  def __call__(self, problem: Any, completion: str) -> float:
    return 0.0

  def __reduce__(self):
    return _raise, ('no start',)


def _raise(argument):
  raise LookupError(argument)


def _sleep(argument):
  time.sleep(float(argument))
  return 1.0


def _spin(argument):
  """Holds the interpreter's lock for ever, in C."""
  re.match(r'(a+)+$', 'a' * 64 + 'b')


def _breed(argument):
  """Starts a process, notes its number in a file and waits for it."""
  code = f'import time; time.sleep({_HOURS})'
  child = subprocess.Popen([sys.executable, '-c', code])
  pathlib.Path(argument).write_text(str(child.pid))
  child.wait()


_VERBS = {
    'give': float,
    'give_text': str,
    'give_none': lambda argument: None,
    'sleep': _sleep,
    'raise': _raise,
    'exit': lambda argument: sys.exit(3),
    'die': lambda argument: os._exit(3),
    'spin': _spin,
    'breed': _breed,
    'print': lambda argument: print(argument) or 1.0,
    'pid': lambda argument: float(os.getpid()),
}
