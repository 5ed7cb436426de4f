"""A task of text, seen as one of tokens: what binds a tokenizer to it."""

from collections.abc import Sequence
import dataclasses

from nvfp4_jax import tokenizer
from nvfp4_jax.tasks import text


@dataclasses.dataclass(frozen=True)
class Problem:
  """A problem of a text task.

  Attributes:
    prompt: token ids of the rendered chat, ready for an answer.
    text: the problem itself.
  """

  prompt: tuple[int, ...]
  text: text.TextProblem


@dataclasses.dataclass(frozen=True)
class TokenTask:
  """A `tasks.Task` that renders a text task's problems as chats.

  The policy is trained on the token ids that it sampled; text is made of them
  for the reward only, and never encoded again.

  Attributes:
    task: the text task.
    words: the tokenizer, with a chat template.
    vocab_size: of the model, which may have tokens that have no text.
    max_answer_tokens: length at which a completion is cut, EOS included.
  """

  task: text.TextTask
  words: tokenizer.Tokenizer
  vocab_size: int
  max_answer_tokens: int

  def __post_init__(self):
    if self.max_answer_tokens < 1:
      raise ValueError(
          f'max_answer_tokens {self.max_answer_tokens} is below 1.'
      )
    if not self.words.eos_ids:
      raise ValueError('The tokenizer names no token that ends an answer.')

  @property
  def eos_ids(self) -> tuple[int, ...]:
    """The tokens that end an answer."""
    return self.words.eos_ids

  def problem(self, split: text.Split, index: int) -> Problem:
    """Returns the index-th problem of a split."""
    problem = self.task.problem(split, index)
    chat = tokenizer.render_chat(self.words, problem.chat())
    return Problem(tuple(tokenizer.encode(self.words, chat)), problem)

  def reward(self, problem: Problem, completion: Sequence[int]) -> float:
    """Returns the reward of a completion's token ids, EOS included."""
    size = self.words.backend.get_vocab_size()
    known = [token for token in completion if token < size]
    answer = tokenizer.decode(self.words, known)
    return self.task.reward(problem.text, answer)
