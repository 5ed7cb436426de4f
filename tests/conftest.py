"""Skips the tests that this machine cannot run."""

import pytest


def pytest_collection_modifyitems(items):
  marked = [item for item in items if item.get_closest_marker('gpu')]
  if not marked:
    return
  # Imported late: asking JAX for its backend takes seconds.
  import jax

  if jax.default_backend() != 'gpu':
    for item in marked:
      item.add_marker(pytest.mark.skip(reason='needs a GPU'))
