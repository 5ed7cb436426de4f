"""What the files of this repository may hold and import.

import-linter checks imports between modules. It sees an external package only
as a whole and no other names, so the rest is checked here on the syntax tree.
"""

import ast
from collections.abc import Iterator
import pathlib
import re
import subprocess
import sys
import tomllib

from absl.testing import absltest
from absl.testing import parameterized

import nvfp4_jax

_ROOT = pathlib.Path(__file__).resolve().parents[1]
_MAX_LINES = 600

# In two halves each, or this file would break its own rule.
_ADDRESSES = {
    '_package_index': r'pypi' r'\.org|files\.python' r'hosted',
    '_index_option': r'(?i)(index|find)[-_]' r'(url|links)|trusted' r'-host',
    '_path_of_one_machine': r'(?<![\w.~$}])/(root|home|work|' r'Users)/',
}


class ImportsTest(parameterized.TestCase):

  def test_import_contracts_hold(self):
    lint_imports = pathlib.Path(sys.executable).with_name('lint-imports')
    result = subprocess.run(
        [lint_imports, '--no-logo', '--no-cache'],
        cwd=_ROOT,
        capture_output=True,
        text=True,
    )
    self.assertEqual(result.returncode, 0, result.stdout + result.stderr)

  def test_layers_in_parentheses_are_not_built(self):
    contracts = _pyproject()['tool']['importlinter']['contracts']
    layers = next(c['layers'] for c in contracts if c['type'] == 'layers')
    for name in re.findall(r'\((\w+)\)', ' '.join(layers)):
      built = list(_ROOT.glob(f'nvfp4_jax/{name}.py'))
      built += _ROOT.glob(f'nvfp4_jax/{name}/*.py')
      self.assertEmpty(built, 'Its layer is no longer optional.')

  @parameterized.parameters(
      'jax.experimental.pallas', 'jax._src.pallas', 'triton'
  )
  def test_kernel_languages_are_used_in_kernels_only(self, name):
    files = _files('nvfp4_jax', 'experiments', besides='nvfp4_jax/kernels')
    self.assertEmpty(_uses(files, name))

  def test_matplotlib_is_used_in_plots_only(self):
    folders = ('nvfp4_jax', 'experiments', 'tests')
    files = _files(*folders, besides='experiments/plots.py')
    files = [f for f in files if f.name != 'simulator_plots.py']
    self.assertEmpty(_uses(files, 'matplotlib'))

  @parameterized.parameters('os.environ', 'os.getenv', 'jax.config')
  def test_package_depends_on_arguments_only(self, name):
    self.assertEmpty(_uses(_files('nvfp4_jax'), name))


class FilesTest(parameterized.TestCase):

  def test_files_are_short(self):
    for path in _files('nvfp4_jax', 'experiments', 'tests'):
      lines = len(path.read_text().splitlines())
      self.assertLessEqual(lines, _MAX_LINES, path.relative_to(_ROOT))

  @parameterized.named_parameters(_ADDRESSES.items())
  def test_no_file_names(self, pattern):
    found = [
        f'{path.relative_to(_ROOT)}:{number}: {line.strip()}'
        for path, text in _texts()
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]
    self.assertEmpty(found)


class PackagingTest(absltest.TestCase):

  def test_version_is_that_of_the_project(self):
    self.assertEqual(nvfp4_jax.__version__, _pyproject()['project']['version'])

  def test_constraints_are_exact_versions(self):
    for line in (_ROOT / 'constraints.txt').read_text().splitlines():
      self.assertRegex(line, r'^[\w.-]+==[\w.]+$')

  def test_every_dependency_is_constrained(self):
    project = _pyproject()['project']
    required = list(project['dependencies'])
    for extra in project['optional-dependencies'].values():
      required += extra
    pins = (_ROOT / 'constraints.txt').read_text().splitlines()
    names = {re.match(r'[\w.-]+', requirement)[0] for requirement in required}
    self.assertEmpty(names - {pin.partition('==')[0] for pin in pins})


def _pyproject() -> dict:
  return tomllib.loads((_ROOT / 'pyproject.toml').read_text())


def _files(*folders: str, besides: str | None = None) -> list[pathlib.Path]:
  """Returns the Python files of the folders, without one file or folder."""
  return [
      path
      for folder in folders
      for path in sorted((_ROOT / folder).rglob('*.py'))
      if besides is None or not path.is_relative_to(_ROOT / besides)
  ]


def _texts() -> Iterator[tuple[pathlib.Path, str]]:
  """Yields the text files that are committed or would be by `git add`."""
  listed = subprocess.run(
      ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard'],
      cwd=_ROOT,
      check=True,
      capture_output=True,
      text=True,
  ).stdout
  for name in filter(None, listed.split('\0')):
    path = _ROOT / name
    if path.is_file() and b'\0' not in (data := path.read_bytes()):
      yield path, data.decode()


def _uses(files: list[pathlib.Path], name: str) -> list[str]:
  """Returns where the files import or name `name` or something inside it."""
  return [
      f'{path.relative_to(_ROOT)}:{line}: {used}'
      for path in files
      for line, used in _dotted_names(ast.parse(path.read_text()))
      if f'{used}.'.startswith(f'{name}.')
  ]


def _dotted_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
  """Yields (line, full name) of imports and of attributes of what they bind.

  After `from jax.experimental import pallas as pl`, both that line and a later
  `pl.load` yield names that begin with `jax.experimental.pallas`.
  """
  bound = {}
  for node in ast.walk(tree):
    if isinstance(node, ast.Import | ast.ImportFrom):
      module = f'{node.module}.' if isinstance(node, ast.ImportFrom) else ''
      for alias in node.names:
        full = module + alias.name
        yield node.lineno, full
        if alias.asname or module:
          bound[alias.asname or alias.name] = full
  for node in ast.walk(tree):
    if isinstance(node, ast.Attribute):
      root, _, rest = ast.unparse(node).partition('.')
      yield node.lineno, f'{bound.get(root, root)}.{rest}'


if __name__ == '__main__':
  absltest.main()
