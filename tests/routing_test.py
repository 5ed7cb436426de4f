"""Tests of routers, against the same formulas in float64 numpy."""

import dataclasses
import math

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import routing

_ROUTERS = {
    'qwen3': routing.Router(),
    'not_normalized': routing.Router(normalize=False),
    'scaled': routing.Router(scale=2.5),
    'sigmoid': routing.Router('sigmoid'),
    'sigmoid_not_normalized': routing.Router('sigmoid', normalize=False),
    'glm': routing.Router('sigmoid', scale=1.5),
    'deepseek': routing.Router('sigmoid', scale=2.5, groups=4, topk_groups=2),
    'one_group': routing.Router('sigmoid', groups=4, topk_groups=1),
    'all_groups': routing.Router('sigmoid', groups=4, topk_groups=4),
}
_EXPERTS = 16
# Products with 1 / sum are rounded to 22 bits, exp is within 3e-7.
_RTOL = 2e-6


def _best(values, k):
  """Returns the indices of the k largest, the lower one first in a tie."""
  return np.argsort(-values, axis=-1, kind='stable')[..., :k]


def _reference(logits, bias, router, k):
  """Returns experts and float64 weights."""
  x = np.asarray(logits, np.float64)
  if router.kind == 'softmax':
    experts = _best(x, k)
    exp = np.exp(x - x.max(-1, keepdims=True))
    p = exp / exp.sum(-1, keepdims=True)
  else:
    # Below -80, experts are equally bad. Scores are compared in float32.
    p = 1 / (1 + np.exp(-np.maximum(x, -80.0)))
    choice = p.astype(np.float32) + (0 if bias is None else np.asarray(bias))
    for row in choice if router.groups > 1 else ():
      grouped = row.reshape(router.groups, -1)
      ranks = np.sort(grouped, axis=-1)[:, -2:].sum(-1)
      for group in _best(ranks, router.groups)[router.topk_groups :]:
        grouped[group] = -np.inf
    experts = _best(choice, k)
  chosen = np.take_along_axis(p, experts, axis=-1)
  if router.normalize:
    chosen = chosen / (chosen.sum(-1, keepdims=True) + 1e-20)
  return experts, router.scale * chosen


def _plain_weights(logits, experts, router):
  """Returns the weights by jax.nn, to be differentiated."""
  scores = jax.nn.softmax if router.kind == 'softmax' else jax.nn.sigmoid
  weights = jnp.take_along_axis(scores(logits), experts, axis=-1)
  if router.normalize:
    weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
  return router.scale * weights


def _reference_gradient(logits, experts, router, dy):
  """Returns the gradient of `sum(dy * weights)`, in float64, by hand."""
  x, dy = np.asarray(logits, np.float64), np.asarray(dy, np.float64)
  dy = router.scale * dy
  at = lambda values: np.take_along_axis(values, experts, axis=-1)
  if router.kind == 'softmax':
    exp = np.exp(x - x.max(-1, keepdims=True))
    own = np.ones_like(dy)
    total = np.sum(at(exp) if router.normalize else exp, -1, keepdims=True)
  else:
    exp = 1 / (1 + np.exp(-np.maximum(x, -80.0)))
    own = 1 - at(exp)
    total = 1.0
    if router.normalize:
      total = np.sum(at(exp), -1, keepdims=True) + 1e-20
  w = exp / total
  mean = np.sum(dy * at(w), -1, keepdims=True)
  if router.kind == 'softmax' and not router.normalize:
    result = -w * mean
    np.put_along_axis(result, experts, at(w) * (dy - mean), axis=-1)
    return result
  result = np.zeros_like(x)
  mean = mean if router.normalize else 0.0
  np.put_along_axis(result, experts, own * at(w) * (dy - mean), axis=-1)
  return result


def _random(tokens=64, scale=2.0):
  kx, kb = jax.random.split(jax.random.key(0))
  logits = scale * jax.random.normal(kx, (tokens, _EXPERTS))
  return logits, 0.3 * jax.random.normal(kb, (_EXPERTS,))


def _edges():
  """Returns `[M, E]` logits: ties, and the far ends of float32's exp."""
  far = np.array([80.0, -80.0, 1e4, -1e4, 0.0, -0.0, 88.0, -88.0], np.float32)
  rng = np.random.default_rng(0)
  one = np.eye(_EXPERTS, dtype=np.float32)
  return np.concatenate(
      [
          np.zeros((1, _EXPERTS), np.float32),
          np.full((1, _EXPERTS), -3.5, np.float32),
          rng.choice(far, (40, _EXPERTS)),
          np.repeat(far[:, None], _EXPERTS, axis=1),
          rng.integers(-2, 3, (40, _EXPERTS)).astype(np.float32),
          *(sign * size * one for sign in (1, -1) for size in (1, 80, 1e4)),
      ]
  )


def _bias(router, bias):
  return bias if router.kind == 'sigmoid' else None


class RouteTest(chex.TestCase):

  def assert_routes(self, logits, bias, router, k):
    route = self.variant(routing.route, static_argnums=(2, 3))
    experts, weights = route(jnp.asarray(logits), bias, router, k)
    self.assertEqual(experts.dtype, jnp.int32)
    self.assertEqual(weights.dtype, jnp.float32)
    want, want_weights = _reference(logits, bias, router, k)
    np.testing.assert_array_equal(experts, want)
    np.testing.assert_allclose(weights, want_weights, rtol=_RTOL, atol=1e-12)
    if router.normalize and np.min(logits) > -40:
      total = np.sum(np.asarray(weights, np.float64), axis=-1)
      np.testing.assert_allclose(total, router.scale, rtol=_RTOL)
    return experts, weights

  @chex.variants(with_jit=True, without_jit=True)
  @parameterized.parameters(*_ROUTERS)
  def test_random_logits(self, name):
    router = _ROUTERS[name]
    logits, bias = _random()
    self.assert_routes(logits, _bias(router, bias), router, 4)

  @chex.variants(with_jit=True)
  @parameterized.product(name=tuple(_ROUTERS), with_bias=(True, False))
  def test_ties_and_extreme_logits(self, name, with_bias):
    router = _ROUTERS[name]
    bias = _bias(router, jnp.arange(_EXPERTS) % 3 / 4.0) if with_bias else None
    _, weights = self.assert_routes(_edges(), bias, router, 4)
    self.assertTrue(np.all(np.isfinite(weights)))

  @chex.variants(with_jit=True)
  @parameterized.parameters('qwen3', 'not_normalized', 'glm', 'all_groups')
  def test_one_expert_and_all_experts(self, name):
    router = _ROUTERS[name]
    logits, bias = _random()
    bias = _bias(router, bias)
    for k in (1, _EXPERTS):
      experts, weights = self.assert_routes(logits, bias, router, k)
    np.testing.assert_array_equal(
        np.sort(experts, axis=-1),
        np.broadcast_to(np.arange(_EXPERTS), experts.shape),
    )
    if router.kind == 'softmax':
      # All experts: normalized or not is one.
      total = np.sum(np.asarray(weights, np.float64), axis=-1)
      np.testing.assert_allclose(total, 1.0, rtol=_RTOL)

  @chex.variants(with_jit=True)
  def test_a_model_of_one_expert(self):
    for router in (routing.Router(), routing.Router('sigmoid')):
      logits = np.array([[-1e4], [-80], [0], [3], [1e4]], np.float32)
      experts, weights = self.variant(routing.route, static_argnums=(2, 3))(
          jnp.asarray(logits), None, router, 1
      )
      np.testing.assert_array_equal(experts, np.zeros((5, 1)))
      # e**-80 is nothing beside the 1e-20 that keeps the sum above 0.
      rows = slice(None) if router.kind == 'softmax' else slice(2, None)
      np.testing.assert_allclose(weights[rows], 1.0, rtol=_RTOL)

  def test_signed_zeros_are_a_tie(self):
    logits = jnp.array([[-0.0, 0.0, -0.0, -1.0]])
    for router in (routing.Router(), routing.Router('sigmoid')):
      bias = _bias(router, jnp.array([-0.0, 0.0, -0.0, 0.0]))
      experts, _ = routing.route(logits, bias, router, 3)
      np.testing.assert_array_equal(experts, [[0, 1, 2]])
    router = routing.Router('sigmoid', groups=2, topk_groups=1)
    bias = jnp.array([-0.5, -0.5, -0.5, -0.5])  # all preferences are 0
    experts, _ = routing.route(jnp.zeros((1, 4)), bias, router, 2)
    np.testing.assert_array_equal(experts, [[0, 1]])

  def test_a_bias_counts_for_the_choice_only(self):
    router = routing.Router('sigmoid', normalize=False)
    logits = jnp.array([[3.0, 0.0, -3.0, 1.0]])
    experts, weights = routing.route(logits, jnp.zeros(4), router, 2)
    np.testing.assert_array_equal(experts, [[0, 3]])
    bias = jnp.array([0.0, 0.0, 2.0, 0.0])
    experts, weights = routing.route(logits, bias, router, 2)
    np.testing.assert_array_equal(experts, [[2, 0]])
    want = 1 / (1 + np.exp([[3.0, -3.0]]))
    np.testing.assert_allclose(weights, want, rtol=_RTOL)

  def test_a_group_counts_by_its_two_best(self):
    """Not by its best one, which would be group 0."""
    router = routing.Router('sigmoid', groups=2, topk_groups=1)
    logits = jnp.array([[3.0, -9.0, -9.0, 1.0, 1.0, -9.0]])
    experts, _ = routing.route(logits, None, router, 2)
    np.testing.assert_array_equal(experts, [[3, 4]])

  def test_a_token_is_independent_of_its_batch(self):
    logits, bias = _random(tokens=33)
    route = jax.jit(routing.route, static_argnums=(2, 3))
    for name in ('qwen3', 'not_normalized', 'deepseek'):
      router = _ROUTERS[name]
      whole = route(logits, _bias(router, bias), router, 4)
      for i in (0, 17, 32):
        part = route(logits[i : i + 1], _bias(router, bias), router, 4)
        for got, want in zip(part, whole, strict=True):
          np.testing.assert_array_equal(got[0], want[i])


class GradientTest(parameterized.TestCase):

  def _gradients(self, logits, router, bias, k=4):
    """Returns dy, experts and the gradient; checks that of the bias."""
    logits = jnp.asarray(logits)
    dy = jax.random.normal(jax.random.key(1), (logits.shape[0], k))

    def loss(x, b):
      experts, weights = routing.route(x, b, router, k)
      return jnp.sum(dy * weights), experts

    if bias is None:
      grad = jax.jit(jax.grad(lambda x: loss(x, None), has_aux=True))
      got, experts = grad(logits)
    else:
      grad = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))
      (got, of_bias), experts = grad(logits, bias)
      np.testing.assert_array_equal(of_bias, np.zeros(_EXPERTS))
    self.assertTrue(np.all(np.isfinite(got)))
    return dy, np.asarray(experts), np.asarray(got)

  @parameterized.parameters(*_ROUTERS)
  def test_are_those_of_the_plain_formula(self, name):
    router = _ROUTERS[name]
    logits, bias = _random()
    dy, experts, got = self._gradients(logits, router, _bias(router, bias))

    @jax.jit
    @jax.grad
    def plain(x):
      return jnp.sum(dy * _plain_weights(x, experts, router))

    want = plain(logits)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    self.assertGreater(np.abs(want).max(), 0.01)
    want = _reference_gradient(logits, experts, router, dy)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    if router.normalize or router.kind == 'sigmoid':
      # Experts that were not chosen have no weight to change.
      chosen = np.zeros(got.shape, bool)
      np.put_along_axis(chosen, experts, True, axis=-1)
      np.testing.assert_array_equal(got[~chosen], 0.0)

  @parameterized.parameters(*_ROUTERS)
  def test_are_finite_at_ties_and_extreme_logits(self, name):
    router = _ROUTERS[name]
    bias = _bias(router, jnp.arange(_EXPERTS) % 3 / 4.0)
    dy, experts, got = self._gradients(_edges(), router, bias)
    want = _reference_gradient(_edges(), experts, router, dy)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)

  def test_scores_too_small_to_normalize(self):
    """Sums near 1e-20, whose square float32 cannot hold."""
    router = routing.Router('sigmoid')
    level = np.array([[-40], [-46], [-50], [-70], [-80], [-100], [-1e4]])
    noise = np.random.default_rng(0).normal(size=(7, _EXPERTS))
    logits = (level + noise).astype(np.float32)
    dy, experts, got = self._gradients(logits, router, jnp.zeros(_EXPERTS))
    want = _reference_gradient(logits, experts, router, dy)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-6)
    self.assertGreater(np.abs(want[:3]).max(axis=1).min(), 1e-3)


class RouterTest(parameterized.TestCase):

  @parameterized.parameters(
      (dict(kind='top'), "'top'"),
      (dict(kind=None), 'None'),
      (dict(kind='sigmoid', groups=0), 'groups 0'),
      (dict(kind='sigmoid', groups=4, topk_groups=0), 'topk_groups 0'),
      (dict(kind='sigmoid', groups=4, topk_groups=5), 'topk_groups 5'),
      (dict(kind='sigmoid', topk_groups=2), 'topk_groups 2'),
      (dict(groups=4, topk_groups=2), "groups 4.*'sigmoid'"),
      (dict(scale=0.0), 'scale 0.0'),
      (dict(scale=-1.0), 'scale -1.0'),
      (dict(scale=math.nan), 'scale nan'),
      (dict(scale=math.inf), 'scale inf'),
  )
  def test_a_wrong_option_is_refused(self, options, reason):
    with self.assertRaisesRegex(ValueError, reason):
      routing.Router(**options)

  def test_a_router_is_static(self):
    router = routing.Router('sigmoid', groups=4, topk_groups=2)
    self.assertEqual(hash(router), hash(dataclasses.replace(router)))
    with self.assertRaises(dataclasses.FrozenInstanceError):
      setattr(router, 'scale', 2.0)  # noqa: B010, a type checker forbids it


if __name__ == '__main__':
  absltest.main()
