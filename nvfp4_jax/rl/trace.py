"""What learner and sampler compute on the way to the same log-probs.

A sampler's completions are run twice: by the learner, all positions at once,
and by the sampler, a prefill and then token by token against its cache. Both
are *traced*: arrays inside of the layers are kept, and compared bit by bit in
the order in which they are computed.

To keep an array may change how XLA fuses what makes it. `replay` without a
trace, `learner.logprobs` and the log-probs of `sampler.generate` say whether
the traced programs have the bits of those that are not.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import policy
from nvfp4_jax import sampler
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer


@dataclasses.dataclass(frozen=True)
class Sampled:
  """Completions; on the host. M is the length of the longest.

  Attributes:
    prompts: `[B, P]` int32, padded on the right.
    lengths: `[B]` int32 prompt lengths.
    tokens: `[B, T]` int32: prompt, completion and padding.
    counts: `[B]` int32, tokens of each completion, at least 1.
    logprobs: `[B, M]` float32 of the completions' tokens, as they were sampled.
    temperature: that they were sampled with.
  """

  prompts: np.ndarray
  lengths: np.ndarray
  tokens: np.ndarray
  counts: np.ndarray
  logprobs: np.ndarray
  temperature: float

  @property
  def mask(self) -> np.ndarray:
    """`[B, M]` bool, the tokens of completions."""
    return np.arange(self.counts.max()) < self.counts[:, None]

  @property
  def sources(self) -> np.ndarray:
    """`[B, M]`, the position whose logits each of these was drawn from."""
    return self.lengths[:, None] - 1 + np.arange(self.counts.max())

  def of_completions(self, values: jax.typing.ArrayLike) -> np.ndarray:
    """Returns `[B, M]` of `[B, T]` values that belong to tokens."""
    return np.take_along_axis(np.asarray(values), self.sources + 1, axis=1)


class Trace(NamedTuple):
  """What one side computed; on the host.

  Attributes:
    stages: `[B, T, F]` by name in the order of computation, such as
      `layers.3.self_attn.q_proj`; see `transformer.forward`.
    logits: `[B, M, V]` float32 that the completions' tokens were drawn from.
    logprobs: `[B, M]` float32 of the completions' tokens.
  """

  stages: Mapping[str, np.ndarray]
  logits: np.ndarray
  logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class Difference:
  """How many positions of a stage differ between two traces.

  Attributes:
    stage: its name.
    positions: how many were compared; those of all rows, without padding.
    differ: how many of them have an element whose bits differ.
    differ_in_prompts: how many of these belong to prompts: the sampler has
      computed them in its prefill, the others in decode steps.
    max_abs: largest |a - b|.
    first: token position and row of the first one; None if there is none.
  """

  stage: str
  positions: int
  differ: int
  differ_in_prompts: int
  max_abs: float
  first: tuple[int, int] | None


def sample(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    prompts: Sequence[Sequence[int]],
    key: jax.Array,
    settings: sampler.SampleConfig,
) -> Sampled:
  """Returns a completion of every prompt, by `sampler.generate`."""
  padded, lengths = sampler.pad_prompts(prompts)
  completions = sampler.generate(
      config, params, quantizer, padded, lengths, key, settings
  )
  counts = np.asarray(completions.mask).sum(axis=1, dtype=np.int32)
  sampled = Sampled(
      prompts=padded,
      lengths=lengths,
      tokens=np.asarray(completions.tokens),
      counts=counts,
      logprobs=np.empty(0),
      temperature=settings.temperature,
  )
  logprobs = sampled.of_completions(completions.logprobs)
  return dataclasses.replace(sampled, logprobs=logprobs)


def trace_learner(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    quantized: policy.ParamTree,
    sampled: Sampled,
) -> Trace:
  """Returns what the learner's teacher-forced forward pass computes.

  Args:
    config: the model.
    params: stacked masters.
    quantizer: the learner's.
    quantized: `quantize_params(quantizer, params)`.
    sampled: the tokens.
  """
  taps, logits, logprobs = jax.device_get(
      _learn(
          config,
          params,
          quantizer,
          quantized,
          sampled.tokens,
          sampled.sources,
          jnp.float32(sampled.temperature),
      )
  )
  return Trace(_by_name(taps), logits, logprobs)


def trace_sampler(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    sampled: Sampled,
) -> Trace:
  """Returns what the sampler computes when its tokens are given.

  Args:
    config: the model.
    params: the tree that the sampler runs.
    quantizer: the sampler's.
    sampled: the tokens.
  """
  first, decoded = _run_replay(config, params, quantizer, sampled, traced=True)
  taps = _join(first.taps, decoded.taps, sampled)
  logits = np.stack([first.logits, *decoded.logits], axis=1)
  logprobs = np.stack([first.logprobs, *decoded.logprobs], axis=1)
  return Trace(_by_name(taps), logits, logprobs)


def replay(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    sampled: Sampled,
) -> np.ndarray:
  """Returns the log-probs `[B, M]` of `trace_sampler`, without a trace."""
  first, decoded = _run_replay(config, params, quantizer, sampled, traced=False)
  return np.stack([first.logprobs, *decoded.logprobs], axis=1)


def differences(a: Trace, b: Trace, sampled: Sampled) -> Iterator[Difference]:
  """Yields the Difference of every stage, in the order of computation.

  The last are `logits` and `logprobs`, at the positions whose logits a
  completion's token was drawn from.
  """
  positions = np.broadcast_to(
      np.arange(sampled.tokens.shape[1]), sampled.tokens.shape
  )
  ends = sampled.lengths + sampled.counts - 1  # the last token is not run
  live = positions < ends[:, None]
  for stage, x in a.stages.items():
    yield _difference(stage, x, b.stages[stage], positions, live, sampled)
  positions, live = sampled.sources, sampled.mask
  yield _difference('logits', a.logits, b.logits, positions, live, sampled)
  x, y = (trace.logprobs[..., None] for trace in (a, b))
  yield _difference('logprobs', x, y, positions, live, sampled)


class _Step(NamedTuple):
  """What the sampler computes for one token of every row."""

  logits: Any
  logprobs: Any
  taps: Any


@functools.partial(jax.jit, static_argnames='config')
def _learn(config, params, quantizer, quantized, tokens, sources, temperature):
  taps = {}
  hidden = transformer.forward(
      config, params, tokens, quantizer, quantized=quantized, taps=taps
  )
  logits = transformer.logits(params, hidden[:, :-1])
  logprobs, _ = layers.token_logprobs(logits, tokens[:, 1:], temperature)
  logits = jnp.take_along_axis(logits, sources[..., None], axis=1)
  return taps, logits, jnp.take_along_axis(logprobs, sources, axis=1)


def _run_replay(config, params, quantizer, sampled, *, traced):
  """Returns the `_Step` of the prefill, and `[S, ...]` of S decode steps."""
  cache = jax.eval_shape(
      lambda: sampler.init_cache(
          config, quantizer.policy, *sampled.tokens.shape
      )
  )
  lives = sampler.live_lengths(
      config, sampled.prompts.shape[1], kv_cache.capacity(cache)
  )
  first, later = jax.device_get(
      _replay(
          config,
          params,
          quantizer,
          sampled.prompts,
          sampled.lengths,
          sampled.tokens,
          jnp.float32(sampled.temperature),
          tuple(_loops(sampled, lives)),
          traced,
      )
  )
  parts = later or [jax.tree.map(lambda x: x[None][:0], first)]
  return first, jax.tree.map(lambda *xs: np.concatenate(xs), *parts)


def _loops(sampled, lives):
  """Yields, for each decode loop of `generate`, its `live` and its steps."""
  step = 1
  for live in lives:
    start = step
    while step < sampled.counts.max():
      running = sampled.counts > step
      if sampled.lengths[running].max() + step - 1 >= live:
        break
      step += 1
    if step > start:
      yield live, step - start


@functools.partial(jax.jit, static_argnames=('config', 'loops', 'traced'))
def _replay(
    config,
    params,
    quantizer,
    prompts,
    lengths,
    tokens,
    temperature,
    loops,
    traced,
):
  rows = jnp.arange(tokens.shape[0])

  def score(hidden, cache, taps):
    logits = transformer.logits(params, hidden)
    token = tokens[rows, cache.lengths]
    logprobs, _ = layers.token_logprobs(logits, token, temperature)
    return _Step(logits if traced else None, logprobs, taps)

  def decode(cache, _, live):
    taps = {} if traced else None
    token = tokens[rows, cache.lengths]
    hidden, cache, _ = transformer.decode_step(
        config, params, token, quantizer, cache, live, taps=taps
    )
    return cache, score(hidden, cache, taps)

  taps = {} if traced else None
  cache = sampler.init_cache(config, quantizer.policy, *tokens.shape)
  hidden, cache, _ = transformer.prefill(
      config, params, prompts, lengths, quantizer, cache, taps=taps
  )
  first, later = score(hidden, cache, taps), []
  for live, steps in loops:
    body = functools.partial(decode, live=live)
    cache, decoded = lax.scan(body, cache, length=steps)
    later.append(decoded)
  return first, later


def _join(prompt, decoded, sampled):
  """Returns taps `[..., B, T, F]` of a prefill's and of S decode steps'.

  Args:
    prompt: of `[..., B, P, F]`.
    decoded: of `[S, ..., B, 1, F]`.
    sampled: where the tokens of decode steps stand.
  """
  room = sampled.tokens.shape[1] - sampled.prompts.shape[1]
  widths = lambda x: [(0, 0)] * (x.ndim - 2) + [(0, room), (0, 0)]
  rows = np.arange(len(sampled.lengths))[:, None]
  positions = sampled.sources[:, 1:]

  def join(x, steps):
    x = np.pad(x, widths(x))
    x[..., rows, positions, :] = np.moveaxis(steps[..., 0, :], 0, -2)
    return x

  return jax.tree.map(join, prompt, decoded)


def _by_name(taps):
  """Returns every stage's `[B, T, F]` by its name."""
  stages, layer = {'embed_tokens': taps['embed_tokens']}, 0
  for segment in taps['layers']:
    for i in range(len(next(iter(segment.values())))):
      for name, x in segment.items():
        stages[f'layers.{layer}.{name}'] = x[i]
      layer += 1
  return stages | {'norm': taps['norm']}


def _difference(stage, a, b, positions, live, sampled):
  """Returns the Difference of `[B, N, F]` arrays where `live` `[B, N]`."""
  bits = np.dtype(f'uint{8 * a.dtype.itemsize}')
  differ = np.any(a.view(bits) != b.view(bits), axis=-1) & live
  in_prompts = differ & (positions < sampled.lengths[:, None])
  first, max_abs = None, 0.0
  if differ.any():
    x, y = (t[differ].astype(np.float64) for t in (a, b))
    max_abs = float(np.max(np.abs(x - y)))
    rows, columns = np.nonzero(differ)
    at = positions[rows, columns]
    first = min(zip(at.tolist(), rows.tolist(), strict=True))
  return Difference(
      stage=stage,
      positions=int(live.sum()),
      differ=int(differ.sum()),
      differ_in_prompts=int(in_prompts.sum()),
      max_abs=max_abs,
      first=first,
  )
