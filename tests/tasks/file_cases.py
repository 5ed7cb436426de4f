"""What tests of files of problems share."""

import json
import pathlib
import tempfile

from absl.testing import parameterized


def dapo_row(prompt: object = 'What is 2 + 3?', answer: object = '5') -> dict:
  """Returns a row with the fields that slime and Miles read."""
  return {'prompt': prompt, 'label': answer}


class FileTestCase(parameterized.TestCase):

  def file(self, *lines: object, name: str = 'data.jsonl') -> pathlib.Path:
    """Returns a file of lines; what is no bytes is written as JSON."""
    root = self.enterContext(tempfile.TemporaryDirectory())
    path = pathlib.Path(root) / name
    path.write_bytes(
        b''.join(
            line
            if isinstance(line, bytes)
            else f'{json.dumps(line)}\n'.encode()
            for line in lines
        )
    )
    return path
