"""Addition in chat form: the question plainly, the answer anywhere.

A model that was never trained for this may restate the sum before it answers,
so the last number of the completion counts.
"""

import dataclasses

from nvfp4_jax.tasks import text
from nvfp4_jax.tasks import verify

_MAX_DIGITS = 6


@dataclasses.dataclass(frozen=True)
class ChatAddition:
  """A task of `text.TextTask`; static.

  a + b and b + a are in the same split, though they are two problems.

  Attributes:
    digits: of each summand, 1 to 6; no summand starts with 0, but for 0 itself.
    seed: of the problems.
    system_prompt: what the chat starts with; empty for none.
  """

  digits: int = 2
  seed: int = 0
  system_prompt: str = ''

  name = 'chat_addition'
  fingerprint = None

  def __post_init__(self):
    if not 1 <= self.digits <= _MAX_DIGITS:
      raise ValueError(f'digits {self.digits} is not in 1 ... {_MAX_DIGITS}.')

  def size(self, split: text.Split) -> None:
    """Returns None: problems are drawn without end, and may repeat."""
    text.check_position(split, 0)

  def problem(self, split: text.Split, index: int) -> text.TextProblem:
    """Returns the index-th problem of a split."""
    text.check_position(split, index)
    attempt = 0
    while True:
      drawn = text.digest('addition', self.seed, split, index, attempt)
      a, b = self._summand(drawn[:16]), self._summand(drawn[16:])
      pair = f'{self.name}/{min(a, b)}+{max(a, b)}'
      if text.is_held_out(pair) == (split == 'held_out'):
        question = f'What is {a} + {b}?'
        return text.TextProblem(
            messages=text.ask(question, self.system_prompt),
            answer=str(a + b),
            uid=f'{self.name}/{a}+{b}',
        )
      attempt += 1

  def reward(self, problem: text.TextProblem, completion: str) -> float:
    """Returns 1.0 if the completion's last number is the sum, else 0.0."""
    return float(verify.last_number(completion) == problem.answer)

  def _summand(self, drawn):
    low = 0 if self.digits == 1 else 10 ** (self.digits - 1)
    # 128 bits leave a bias below 1e-32.
    return low + int.from_bytes(drawn) % (10**self.digits - low)
