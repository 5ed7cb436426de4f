"""Problems that are text: a chat out, a reward for the answer's text in.

Whoever trains on them brings the tokenizer: a task never sees a token.
"""

from collections.abc import Callable
import dataclasses
import hashlib
import json
from typing import Any, Literal, Protocol
import unicodedata

type Split = Literal['train', 'held_out']

SPLITS = ('train', 'held_out')
_ROLES = ('system', 'user', 'assistant')
_HELD_OUT_SHARE = 8  # one problem in so many is held out


@dataclasses.dataclass(frozen=True)
class Message:
  """One message of a chat.

  Attributes:
    role: 'system', 'user' or 'assistant'.
    content: text that has a UTF-8 form.
  """

  role: str
  content: str

  def __post_init__(self):
    if self.role not in _ROLES:
      raise ValueError(f'Role {self.role!r} is not one of {_ROLES}.')
    self.content.encode()  # Raises UnicodeEncodeError, a ValueError.


@dataclasses.dataclass(frozen=True)
class TextProblem:
  """One problem.

  Attributes:
    messages: the chat that asks.
    answer: the right answer, in the form that the task's reward compares with.
    uid: names the problem by what it asks, whatever seed, split or order it
      came by. A batch may hold a problem twice, so it does not name a group.
  """

  messages: tuple[Message, ...]
  answer: str
  uid: str

  def chat(self) -> list[dict[str, str]]:
    """Returns the messages as a chat template takes them."""
    return [dataclasses.asdict(message) for message in self.messages]


type Reward = Callable[[Any, Any], float]


class TextTask(Protocol):
  """Text problems by (seed, split, index), and the rewards of completions.

  The splits share no problem, not even under different seeds.
  """

  @property
  def name(self) -> str:
    """A name in `tasks.TEXT_TASKS`."""
    ...

  @property
  def fingerprint(self) -> str | None:
    """SHA-256 of the file of problems; None where they are generated.

    A run that goes on with another file has lost its place in the data.
    """
    ...

  def size(self, split: Split) -> int | None:
    """Returns the number of problems, or None where there is no end."""
    ...

  def problem(self, split: Split, index: int) -> TextProblem:
    """Returns the index-th problem of a split; past the end they repeat."""
    ...

  def reward(self, problem: TextProblem, completion: str) -> float:
    """Returns the reward of a completion's text, without special tokens."""
    ...


def ask(question: str, system_prompt: str = '') -> tuple[Message, ...]:
  """Returns a chat of one question, after a system prompt if that is given."""
  system = (Message('system', system_prompt),) if system_prompt else ()
  return (*system, Message('user', question))


def check_position(split: str, index: int) -> None:
  """Raises ValueError unless this is a split and a place in it."""
  if split not in SPLITS:
    raise ValueError(f'Split {split!r} is not one of {SPLITS}.')
  if index < 0:
    raise ValueError(f'Index {index} is below 0.')


def digest(*parts: str | int) -> bytes:
  """Returns 32 bytes that differ for different parts, alike everywhere."""
  # JSON keeps ('a', 'b') and ('ab',) apart. So does repr, but what that makes
  # of rare characters changes with the version of Python.
  return hashlib.sha256(json.dumps(parts).encode()).digest()


def normalize(prompt: str) -> str:
  """Returns a prompt with composed characters and single spaces."""
  return ' '.join(unicodedata.normalize('NFC', prompt).split())


def is_held_out(uid: str) -> bool:
  """Returns whether a problem belongs to the held-out split."""
  return int.from_bytes(digest(uid)[:8]) % _HELD_OUT_SHARE == 0
