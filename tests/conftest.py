"""Skips tests that this machine cannot run; shares and hastens compilation."""

import os
import tempfile

import pytest


def pytest_addoption(parser):
  parser.addoption(
      '--full-compile',
      action='store_true',
      help='compile everything as for users, `quick_compile` or not (slower)',
  )


def pytest_configure(config):
  """Lets all processes of a test run find what one of them has compiled.

  JAX reads these variables when it is imported, which has not happened yet;
  the workers of pytest-xdist inherit them.
  """
  if hasattr(config, 'workerinput'):
    return
  cache = tempfile.TemporaryDirectory(prefix='nvfp4_jax_test_cache')
  config.add_cleanup(cache.cleanup)
  os.environ['JAX_COMPILATION_CACHE_DIR'] = cache.name
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'


def pytest_collection_modifyitems(items):
  marked = [item for item in items if item.get_closest_marker('gpu')]
  if not marked:
    return
  # Imported late: asking JAX for its backend takes seconds.
  import jax

  if jax.default_backend() != 'gpu':
    for item in marked:
      item.add_marker(pytest.mark.skip(reason='needs a GPU'))


def _compile_quickly(request):
  """Leaves out most optimizations where `quick_compile` is marked.

  The programs are dropped at the end, since other tests look at the bits of
  what users run.
  """
  marks = {mark.name for mark in request.node.own_markers}
  full = request.config.getoption('--full-compile')
  if full or 'quick_compile' not in marks:
    yield
    return
  # Imported late, as above.
  import jax

  from tests import compilation

  with compilation.quick():
    yield
  jax.clear_caches()


_of_module = pytest.fixture(_compile_quickly, scope='module', autouse=True)
_of_class = pytest.fixture(_compile_quickly, scope='class', autouse=True)
