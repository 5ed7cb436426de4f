"""Tasks: a prompt out, a reward in. Plain Python, no JAX.

Problems are made from (seed, split, index), so that a data cursor is one
integer and a resumed run sees the same problems.
"""

from collections.abc import Callable, Mapping
import dataclasses
import types
from typing import Literal, Protocol

from nvfp4_jax.tasks import arithmetic

Split = Literal['train', 'held_out']


class Task(Protocol):
  """What the training loop needs of a task."""

  @property
  def vocab_size(self) -> int:
    """Number of tokens."""
    ...

  @property
  def eos(self) -> int:
    """The token that ends an answer."""
    ...

  @property
  def max_answer_tokens(self) -> int:
    """Number of tokens of the longest answer, EOS included."""
    ...

  def problem(self, split: Split, index: int) -> arithmetic.Problem:
    """Returns the index-th problem of a split."""
    ...

  def reward(self, problem: arithmetic.Problem, completion: list[int]) -> float:
    """Returns the reward of a completion's token ids, EOS included."""
    ...


TASKS: Mapping[str, Callable[..., Task]] = types.MappingProxyType(
    {name: arithmetic.make(name) for name in arithmetic.RULES}
)


@dataclasses.dataclass(frozen=True)
class TaskConfig:
  """Which task; static.

  Attributes:
    name: a name in `TASKS`.
    digits: digits of a problem; of each summand, in addition.
    seed: of the problems.
  """

  name: str = 'running_sum'
  digits: int = 8
  seed: int = 0

  def make(self) -> Task:
    """Returns the task; a ValueError for an unknown name lists all."""
    if self.name not in TASKS:
      raise ValueError(f'Task {self.name!r} is not one of {sorted(TASKS)}.')
    return TASKS[self.name](digits=self.digits, seed=self.seed)
