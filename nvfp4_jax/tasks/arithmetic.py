"""Generated arithmetic, written digit by digit.

* `running_sum`: digits a_1 ... a_n; answer r_i = (r_{i-1} + a_i) mod 10.
* `running_product`: r_i = (r_{i-1} + a_{i-1} a_i) mod 10, with a_0 = 1.
* `addition`: two numbers of n digits; their sum, lowest digit first.

The reward is 1 for exactly the right answer and EOS, else 0. A problem belongs
to the training or to the held-out split by a hash of its digits, so that the
two never share a problem.
"""

from collections.abc import Callable
import dataclasses
import functools
import zlib

import numpy as np

EOS, EQUALS, PLUS = 1, 12, 13
VOCAB_SIZE = 16
_FIRST_DIGIT = 2  # token of the digit 0; token 0 is padding
_HELD_OUT_SHARE = 8  # one problem in so many is held out
_SPLITS = ('train', 'held_out')


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem.

  Attributes:
    prompt: token ids.
    answer: token ids of the right completion, EOS included.
    digits: the digits that make it.
  """

  prompt: tuple[int, ...]
  answer: tuple[int, ...]
  digits: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Arithmetic:
  """A task of `tasks.Task`; static.

  Attributes:
    rule: one of `RULES`.
    digits: how many digits.
    seed: of the problems.
  """

  rule: str
  digits: int
  seed: int

  vocab_size = VOCAB_SIZE
  eos_ids = (EOS,)

  def __post_init__(self):
    if self.rule not in RULES:
      raise ValueError(f'Rule {self.rule!r} is not one of {sorted(RULES)}.')
    if self.digits < 1:
      raise ValueError(f'digits {self.digits} is below 1.')

  @property
  def max_answer_tokens(self) -> int:
    """Number of tokens of the longest answer, EOS included."""
    return self.digits + (2 if self.rule == 'addition' else 1)

  def problem(self, split: str, index: int) -> Problem:
    """Returns the index-th problem of the split 'train' or 'held_out'."""
    if split not in _SPLITS:
      raise ValueError(f'Split {split!r} is not one of {_SPLITS}.')
    rng = np.random.default_rng([self.seed, _SPLITS.index(split), index])
    count = 2 * self.digits if self.rule == 'addition' else self.digits
    while True:
      digits = tuple(rng.integers(0, 10, count).tolist())
      if _is_held_out(digits) == (split == 'held_out'):
        return self._make(digits)

  def reward(self, problem: Problem, completion: list[int]) -> float:
    """Returns 1.0 if the completion is the answer and EOS, else 0.0."""
    return float(tuple(completion) == problem.answer)

  def misinformed_answer(
      self, problem: Problem, rng: np.random.Generator, probability: float
  ) -> tuple[int, ...]:
    """Returns an answer by a teacher that holds some wrong facts.

    A fixed fifth of the facts (which sum, for which state and digits) is wrong,
    always in the same way; where one is met, it is used with `probability`,
    and the steps after it go on from there (in addition a wrong digit leaves
    the carry right). A policy trained on this has
    something to unlearn: reinforcement can teach it more than to be certain.
    """
    wrong = _wrong_facts()

    def corrupt(state, a, b, right):
      if rng.random() < probability:
        return int(right + wrong[state, a, b]) % 10
      return right

    return _encode_answer(RULES[self.rule](problem.digits, corrupt))

  def _make(self, digits):
    prompt = [_FIRST_DIGIT + d for d in digits] + [EQUALS]
    if self.rule == 'addition':
      prompt.insert(self.digits, PLUS)
    answer = RULES[self.rule](digits, lambda state, a, b, right: right)
    return Problem(tuple(prompt), _encode_answer(answer), digits)


def make(rule: str) -> Callable[..., Arithmetic]:
  """Returns the constructor of a rule's task."""
  return functools.partial(Arithmetic, rule)


def _running_sum(digits, corrupt):
  state, answer = 0, []
  for a in digits:
    state = corrupt(state, a, 0, (state + a) % 10)
    answer.append(state)
  return answer


def _running_product(digits, corrupt):
  state, answer = 0, []
  for a, b in zip(digits, (1, *digits), strict=False):
    state = corrupt(state, a, b, (state + a * b) % 10)
    answer.append(state)
  return answer


def _addition(digits, corrupt):
  n = len(digits) // 2
  carry, answer = 0, []
  for a, b in zip(reversed(digits[:n]), reversed(digits[n:]), strict=True):
    answer.append(corrupt(carry, a, b, (a + b + carry) % 10))
    carry = (a + b + carry) // 10
  return [*answer, carry]


RULES = {
    'running_sum': _running_sum,
    'running_product': _running_product,
    'addition': _addition,
}


def _encode_answer(digits):
  return (*(_FIRST_DIGIT + d for d in digits), EOS)


def _is_held_out(digits):
  return zlib.crc32(bytes(digits)) % _HELD_OUT_SHARE == 0


@functools.cache
def _wrong_facts():
  """Returns offsets `[10, 10, 10]` by (state, a, b); 0 where it is right."""
  rng = np.random.default_rng(0)
  offsets = rng.integers(1, 10, (10, 10, 10))
  return np.where(rng.random((10, 10, 10)) < 0.2, offsets, 0)
