"""GSM8K: word problems of grade-school mathematics.

A row has the fields `question` and `answer`; the answer is a solution in words
that ends with `#### N`. The request behind the question is the one of verl, so
that results can be compared.

Reference: "Training Verifiers to Solve Math Word Problems",
  https://arxiv.org/abs/2110.14168.
"""

import functools
import pathlib
from typing import Literal

from nvfp4_jax.tasks import records
from nvfp4_jax.tasks import text
from nvfp4_jax.tasks import verify

NAME = 'gsm8k'
SAMPLE = pathlib.Path(__file__).parent / 'data' / 'gsm8k_sample.jsonl'
SCORERS = ('strict', 'flexible')

_REQUEST = 'Let\'s think step by step and output the final answer after "####".'


def make(
    path: pathlib.Path | None = None,
    *,
    seed: int = 0,
    scorer: Literal['strict', 'flexible'] = 'strict',
    system_prompt: str = '',
) -> records.FileTask:
  """Returns the task of a file.

  Args:
    path: the file; by default a sample of our own, a few easy problems.
    seed: of the training problems' order.
    scorer: where the answer must stand, see `verify.gsm8k_answer`.
    system_prompt: what the chat starts with; empty for none.

  Raises:
    records.DataError: the file is not as described.
    ValueError: no such scorer.
  """
  if scorer not in SCORERS:
    raise ValueError(f'Scorer {scorer!r} is not one of {SCORERS}.')
  parse_row = functools.partial(parse, system_prompt=system_prompt)
  return records.FileTask(
      name=NAME,
      table=records.read(path or SAMPLE, NAME, parse_row),
      seed=seed,
      score=functools.partial(score, scorer=scorer),
  )


def parse(
    row: records.Row, *, system_prompt: str = ''
) -> tuple[tuple[text.Message, ...], str]:
  """Returns the chat and the answer, a canonical number, of a row.

  Raises:
    ValueError: a field is missing or no text, or `#### N` is not there.
  """
  question = records.field(row, 'question').strip()
  answer = verify.gsm8k_truth(records.field(row, 'answer'))
  if answer is None:
    raise ValueError("'answer' does not end with '#### ' and a number")
  return text.ask(f'{question} {_REQUEST}', system_prompt), answer


def score(
    problem: text.TextProblem, completion: str, *, scorer: str = 'strict'
) -> float:
  """Returns 1.0 if the completion's answer is the problem's, else 0.0."""
  answer = verify.gsm8k_answer(completion, strict=scorer == 'strict')
  return float(answer == problem.answer)
