"""Tasks: a prompt out, a reward in. Plain Python, no JAX.

Problems are made from (seed, split, index), so that a data cursor is one
integer and a resumed run sees the same problems. A `Task` speaks tokens of its
own; a `text.TextTask` speaks text, and whoever runs it brings the tokenizer.
"""

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
import types
from typing import Any, Protocol

from nvfp4_jax.tasks import addition
from nvfp4_jax.tasks import arithmetic
from nvfp4_jax.tasks import dapo_math
from nvfp4_jax.tasks import gsm8k
from nvfp4_jax.tasks import reasoning_gym
from nvfp4_jax.tasks import text

Split = text.Split


class Task(Protocol):
  """What the training loop needs of a task."""

  @property
  def vocab_size(self) -> int:
    """Number of tokens."""
    ...

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end an answer."""
    ...

  @property
  def max_answer_tokens(self) -> int:
    """Number of tokens of the longest answer, EOS included."""
    ...

  def problem(self, split: Split, index: int) -> Any:
    """Returns the index-th problem of a split; its `prompt` is token ids."""
    ...

  def reward(self, problem: Any, completion: list[int]) -> float:
    """Returns the reward of a completion's token ids, EOS included."""
    ...


TASKS: Mapping[str, Callable[..., Task]] = types.MappingProxyType(
    {name: arithmetic.make(name) for name in arithmetic.RULES}
)
TEXT_TASKS: Mapping[str, Callable[..., text.TextTask]] = types.MappingProxyType(
    {
        'chat_addition': addition.ChatAddition,
        'dapo_math': dapo_math.make,
        'gsm8k': gsm8k.make,
        'reasoning_gym': reasoning_gym.ReasoningGym,
    }
)

_ARITHMETIC_DIGITS = 8
# Which fields of a config each text task takes besides `seed`.
_TEXT_FIELDS = {
    'chat_addition': ('digits', 'system_prompt'),
    'dapo_math': ('path', 'scorer'),
    'gsm8k': ('path', 'scorer', 'system_prompt'),
    'reasoning_gym': ('dataset', 'scorer', 'system_prompt'),
}


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """Which task; static.

  A field that the task has no use for must keep its default.

  Attributes:
    name: a name in `TASKS` or `TEXT_TASKS`.
    digits: digits of a problem; of each summand, in addition. By default 8, and
      2 in chat_addition.
    seed: of the problems, or of their order.
    path: file of problems (dapo_math, gsm8k); by default a small sample.
    dataset: name of a data set (reasoning_gym).
    scorer: how an answer is found or compared: 'strict' or 'flexible' (gsm8k),
      'normalized' or 'math_verify' (dapo_math), 'tag' or 'last_number'
      (reasoning_gym). Empty for the first of these.
    system_prompt: what chats start with (chat_addition, gsm8k, reasoning_gym).
  """

  name: str = 'running_sum'
  digits: int | None = None
  seed: int = 0
  path: pathlib.Path | None = None
  dataset: str = ''
  scorer: str = ''
  system_prompt: str = ''

  @property
  def is_text(self) -> bool:
    """Whether the task speaks text, so that `make_text` makes it."""
    self._check_name()
    return self.name in TEXT_TASKS

  def make(self) -> Task:
    """Returns a task of tokens.

    Raises:
      ValueError: an unknown name (all are listed), that of a text task, or a
        field that the task does not take.
    """
    if self.is_text:
      raise ValueError(
          f'Task {self.name!r} speaks text: it needs a tokenizer, and'
          ' `make_text`.'
      )
    given = {'digits': _ARITHMETIC_DIGITS, **self._given(('digits',))}
    return TASKS[self.name](seed=self.seed, **given)

  def make_text(self) -> text.TextTask:
    """Returns a task of text.

    Raises:
      ValueError: an unknown name (all are listed), that of a task of tokens, a
        field that the task does not take, or a file that is not as its format
        says.
      ImportError: an optional package is missing.
    """
    if not self.is_text:
      raise ValueError(f'Task {self.name!r} speaks tokens: use `make`.')
    given = self._given(_TEXT_FIELDS[self.name])
    if self.name == 'reasoning_gym' and not self.dataset:
      raise ValueError('Task reasoning_gym needs a `dataset`.')
    return TEXT_TASKS[self.name](seed=self.seed, **given)

  def _check_name(self):
    names = sorted({**TASKS, **TEXT_TASKS})
    if self.name not in names:
      raise ValueError(f'Task {self.name!r} is not one of {names}.')

  def _given(self, taken):
    """Returns the fields that were set; all must be among those taken."""
    given = {
        field.name: getattr(self, field.name)
        for field in dataclasses.fields(self)
        if field.name not in ('name', 'seed')
        and getattr(self, field.name) != field.default
    }
    unused = sorted(set(given) - set(taken))
    if unused:
      raise ValueError(
          f'Task {self.name!r} does not take {unused}; it takes'
          f' {sorted(("seed", *taken))}.'
      )
    return given
