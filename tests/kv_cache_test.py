"""The KV cache: what is stored, what is read, and what learners see of it."""

import dataclasses
import functools

from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import kv_cache
from nvfp4_jax import policy
from nvfp4_jax import qtensor
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import learner

CONFIG = dataclasses.replace(
    model_config.tiny(16),
    num_layers=2,
    num_experts=0,
    experts_per_token=0,
    moe_dim=0,
    mlp_dim=64,
)
FP8 = policy.Quantizer(dataclasses.replace(policy.BF16, kv_cache='fp8'))
BF16 = policy.Quantizer(policy.BF16)


def _keys(seed, shape=(2, 3, 5, 16)):
  x = jax.random.normal(jax.random.key(seed), shape)
  return x.astype(jnp.bfloat16)


@functools.cache
def _tree(gain=1.0):
  params = transformer.init_params(jax.random.key(0), CONFIG)
  stacked = transformer.stack(jax.tree.map(lambda p: 1.5 * p, params), (2,))
  segment = dict(stacked['layers'][0])
  for name in ('self_attn.k_proj', 'self_attn.v_proj'):
    segment[name] = segment[name] * gain
  return policy.quantize_params(BF16, stacked | {'layers': (segment,)})


def _sample(quantizer, gain=1.0):
  rng = np.random.default_rng(0)
  prompts = [rng.integers(1, 16, n) for n in (3, 9, 6)]
  return sampler.generate(
      CONFIG,
      _tree(gain),
      quantizer,
      *sampler.pad_prompts(prompts),
      jax.random.key(1),
      sampler.SampleConfig(10),
  )


def _gap(completions, quantizer, gain=1.0):
  """The largest gap of a learner."""
  logprobs = learner.logprobs(
      CONFIG, _tree(gain), quantizer, _tree(gain), completions.tokens, 1.0
  )
  gap = jnp.where(completions.mask, logprobs - completions.logprobs, 0)
  return float(jnp.max(jnp.abs(gap)))


class StorageTest(parameterized.TestCase):

  @parameterized.parameters('bf16', 'fp8')
  def test_positions_hold_what_was_written(self, name):
    spec = kv_cache.SPECS[name]
    cache = kv_cache.init(2, 2, 3, 16, 16, spec=spec)
    self.assertEqual(kv_cache.capacity(cache), 16)
    k, v, more = _keys(0), _keys(1), _keys(2, (2, 3, 1, 16))
    store = lambda x: kv_cache.store(x, spec)
    layer = jnp.int32(1)
    cache = kv_cache.write_prompt(cache, layer, store(k), store(v))
    cache = dataclasses.replace(cache, lengths=jnp.array([2, 5]))
    cache = kv_cache.write_token(cache, layer, store(more), store(-more))
    got = [
        kv_cache.load(x, jnp.bfloat16) for x in kv_cache.read(cache, layer, 8)
    ]
    want = [np.zeros((2, 3, 8, 16), np.float32) for _ in range(2)]
    for x, (prompt, token) in zip(want, ((k, more), (v, -more)), strict=True):
      trip = lambda x: np.asarray(kv_cache.round_trip(x, spec), np.float32)
      x[:, :, :5] = trip(prompt)
      for row, length in enumerate((2, 5)):
        x[row, :, length] = trip(token)[row, :, 0]
    chex.assert_trees_all_equal(
        [x.astype(jnp.float32) for x in got], [jnp.asarray(x) for x in want]
    )
    untouched = kv_cache.read(cache, jnp.int32(0), 8)
    for x in untouched:
      self.assertFalse(bool(jnp.any(kv_cache.load(x, jnp.float32) != 0)))

  def test_each_key_has_a_scale_of_its_own(self):
    k = _keys(0)
    loud = k.at[0, 1, 2].mul(1000)
    a, b = (kv_cache.round_trip(x, kv_cache.FP8) for x in (k, loud))
    same = np.ones(k.shape[:3], bool)
    same[0, 1, 2] = False
    chex.assert_trees_all_equal(a[same], b[same])
    error = jnp.abs(a.astype(jnp.float32) - k.astype(jnp.float32))
    amax = jnp.max(jnp.abs(k.astype(jnp.float32)), axis=-1, keepdims=True)
    # Half a step of E4M3 in the highest binade, 2^-4 of 448/448.
    self.assertLessEqual(float(jnp.max(error / amax)), 1 / 28 + 2**-8)
    self.assertGreater(float(jnp.max(error / amax)), 0.01)

  def test_fp8_takes_half_of_the_bytes_and_scales(self):
    sizes = [
        qtensor.nbytes((cache.k, cache.v))
        for cache in (
            kv_cache.init(2, 2, 3, 16, 128, spec=spec)
            for spec in (None, kv_cache.FP8)
        )
    ]
    self.assertEqual(sizes[1], sizes[0] // 2 + 2 * 2 * 2 * 3 * 16 * 4)

  def test_gradient_passes_through(self):
    k = _keys(0).astype(jnp.float32)
    dy = jax.random.normal(jax.random.key(3), k.shape)
    _, vjp = jax.vjp(lambda x: kv_cache.round_trip(x, kv_cache.FP8), k)
    chex.assert_trees_all_equal(vjp(dy)[0], dy)


class PolicyTest(absltest.TestCase):

  def test_learner_sees_the_samplers_cache(self):
    completions = _sample(FP8)
    self.assertEqual(_gap(completions, FP8), 0.0)
    self.assertGreater(_gap(completions, BF16), 1e-3)

  def test_nothing_is_stale_after_an_update(self):
    # Keys and values a thousand times larger than before.
    completions = _sample(FP8, gain=1000.0)
    self.assertTrue(bool(jnp.all(jnp.isfinite(completions.logprobs))))
    self.assertEqual(_gap(completions, FP8, gain=1000.0), 0.0)

  def test_unknown_cache_is_refused(self):
    with self.assertRaisesRegex(ValueError, "kv_cache 'int8' is not one of"):
      policy.PrecisionPolicy(kv_cache='int8')


if __name__ == '__main__':
  absltest.main()
