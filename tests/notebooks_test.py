"""Every notebook runs from top to bottom, with the smoke preset."""

import os
import pathlib
import tempfile
from unittest import mock

from absl.testing import parameterized
import nbclient
import nbformat

_FOLDER = pathlib.Path(__file__).parents[1] / 'colab'
_NOTEBOOKS = sorted(path.name for path in _FOLDER.glob('*.ipynb'))


class NotebooksTest(parameterized.TestCase):

  @parameterized.parameters(*_NOTEBOOKS)
  def test_runs_from_top_to_bottom(self, name):
    notebook = nbformat.read(_FOLDER / name, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
      env = {
          'NVFP4_JAX_NOTEBOOK_PRESET': 'smoke',
          'NVFP4_JAX_NOTEBOOK_RUNS': folder,
          'JAX_DISABLE_MOST_OPTIMIZATIONS': '1',  # half the time to compile
      }
      client = nbclient.NotebookClient(
          notebook, timeout=600, resources={'metadata': {'path': _FOLDER}}
      )
      with mock.patch.dict(os.environ, env):
        client.execute()
    pictures = [
        output
        for cell in notebook.cells
        for output in cell.get('outputs', ())
        if 'image/png' in output.get('data', ())
    ]
    shown = [cell for cell in notebook.cells if 'Image(' in cell.source]
    self.assertGreaterEqual(len(shown), 2)
    self.assertLen(pictures, len(shown))

  @parameterized.parameters(*_NOTEBOOKS)
  def test_is_stored_without_outputs_and_without_logic(self, name):
    notebook = nbformat.read(_FOLDER / name, as_version=4)
    for cell in notebook.cells:
      self.assertFalse(cell.get('outputs'))
      for word in ('def ', 'for ', 'while ', 'lambda'):
        if cell.cell_type == 'code':
          self.assertNotIn(word, cell.source)

  def test_there_are_notebooks(self):
    self.assertGreaterEqual(len(_NOTEBOOKS), 2)
