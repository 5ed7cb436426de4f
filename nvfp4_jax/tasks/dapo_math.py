r"""DAPO-math-17k and files like it: a problem and its short answer.

The rows of a file have the fields of one of these:

* BytedTsinghua-SIA/DAPO-Math-17k: `prompt`, a list of {role, content}, and
  `reward_model`, an object with `ground_truth`;
* the JSON lines that slime and Miles read: `prompt`, likewise, and `label`;
* open-r1/DAPO-Math-17k-Processed: `prompt`, a text, and `solution`.

`prompt` may be a text or a list in all three. One that asks neither for a line
`Answer:` nor for a box is followed by a request for such a line, since the
scorer looks for one of the two (`verify.dapo_answer`).

Reference: "DAPO: An Open-Source LLM Reinforcement Learning System at Scale",
  https://arxiv.org/abs/2503.14476. Its reward is 1 or -1; ours is 1 or 0, which
  gives the same group-relative advantages and averages to an accuracy.
"""

import functools
import pathlib
from typing import Any, Literal

from nvfp4_jax.tasks import records
from nvfp4_jax.tasks import text
from nvfp4_jax.tasks import verify

NAME = 'dapo_math'
SAMPLE = pathlib.Path(__file__).parent / 'data' / 'dapo_math_sample.jsonl'
SCORERS = ('normalized', 'math_verify')

# The first that a row has is its answer; some files have several.
_ANSWERS = {
    'reward_model': 'reward_model.ground_truth',
    'label': 'label',
    'solution': 'solution',
}
_REQUEST = (
    'Think step by step. Then write, as the last line, "Answer:" and the answer'
    ' alone.'
)


def make(
    path: pathlib.Path | None = None,
    *,
    seed: int = 0,
    scorer: Literal['normalized', 'math_verify'] = 'normalized',
) -> records.FileTask:
  """Returns the task of a file.

  Args:
    path: the file; by default a sample of our own, a few easy problems.
    seed: of the training problems' order.
    scorer: compares answers by `verify.answers_equal`, or by math-verify too.

  Raises:
    records.DataError: the file is not as described.
    ImportError: math-verify is asked for and not installed.
    ValueError: no such scorer.
  """
  if scorer not in SCORERS:
    raise ValueError(f'Scorer {scorer!r} is not one of {SCORERS}.')
  if scorer == 'math_verify':
    verify.math_verify_equal('1', '1')  # Raises now, not at the first reward.
  return records.FileTask(
      name=NAME,
      table=records.read(path or SAMPLE, NAME, parse),
      seed=seed,
      score=functools.partial(score, scorer=scorer),
  )


def parse(row: records.Row) -> tuple[tuple[text.Message, ...], str]:
  """Returns the chat and the answer of a row.

  Raises:
    ValueError: the row is not as the module says.
  """
  present = [name for name in _ANSWERS if name in row]
  if not present:
    raise ValueError(f'none of the fields {list(_ANSWERS)} is there')
  answer = records.field(row, _ANSWERS[present[0]]).strip()
  if isinstance(row.get('prompt'), list):
    messages = _messages(row['prompt'])
  else:
    messages = text.ask(records.field(row, 'prompt'))
  return _with_request(messages), answer


def score(
    problem: text.TextProblem, completion: str, *, scorer: str = 'normalized'
) -> float:
  """Returns 1.0 if the completion's answer is the problem's, else 0.0."""
  answer = verify.dapo_answer(completion)
  if not answer:
    return 0.0
  if verify.answers_equal(answer, problem.answer, units=verify.UNITS):
    return 1.0
  if scorer == 'math_verify':
    return float(verify.math_verify_equal(answer, problem.answer))
  return 0.0


def _messages(prompt: list[Any]) -> tuple[text.Message, ...]:
  messages = []
  for i, message in enumerate(prompt):
    if not isinstance(message, dict):
      raise ValueError(f"'prompt' has as item {i} no object")
    messages.append(
        text.Message(
            records.field(message, 'role'), records.field(message, 'content')
        )
    )
  if not messages or messages[-1].role != 'user':
    raise ValueError("'prompt' does not end with a message of the user")
  return tuple(messages)


def _with_request(messages):
  asked = '\n'.join(message.content for message in messages)
  if 'answer:' in asked.lower() or r'\boxed' in asked:
    return messages
  last = messages[-1]
  content = f'{last.content}\n\n{_REQUEST}'
  return (*messages[:-1], text.Message(last.role, content))
