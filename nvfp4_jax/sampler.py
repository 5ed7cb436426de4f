"""Sampling: a jitted prefill and decode loop on a KV cache.

Rows are independent of one another: each has its own random key, and with
per-token activation scales its tokens and log-probs do not change with the
other rows, with padding or with the length of the cache.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools

from flax import struct
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from nvfp4_jax import kv_cache
from nvfp4_jax import layers
from nvfp4_jax import policy
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer

PAD = 0
_SMALLEST_BUCKET = 8


@dataclasses.dataclass(frozen=True)
class SampleConfig:
  """How completions are sampled; static.

  Attributes:
    max_new_tokens: the most tokens of a completion, EOS included.
    eos_ids: tokens that end a completion; may be empty.
    temperature: of the softmax; 0 means greedy.
    cache_length: positions in the cache; None for as many as are needed.
    record_experts: keep which experts each token went to.
  """

  max_new_tokens: int
  eos_ids: tuple[int, ...] = ()
  temperature: float = 1.0
  cache_length: int | None = None
  record_experts: bool = False

  def __post_init__(self):
    if self.max_new_tokens < 1:
      raise ValueError(f'max_new_tokens {self.max_new_tokens} is below 1.')
    if not self.temperature >= 0:
      raise ValueError(f'temperature {self.temperature} is negative.')


@struct.dataclass
class Completions:
  """What was sampled.

  Attributes:
    tokens: `[B, P + max_new_tokens]` int32: prompt, completion (EOS included)
      and padding of each row, without gaps.
    mask: `[B, P + max_new_tokens]` bool, the completion's tokens.
    logprobs: `[B, P + max_new_tokens]` float32, log-prob of each completion
      token under the distribution that it was drawn from; 0 elsewhere, and
      when greedy.
    truncated: `[B]` bool, the completion ended without EOS.
    expert_ids: `[B, P + max_new_tokens, L, k]` int32, the experts of each token
      in each of the L layers that have experts; 0 for tokens that were not run
      (the last one and padding). None if they were not recorded.
  """

  tokens: jax.Array
  mask: jax.Array
  logprobs: jax.Array
  truncated: jax.Array
  expert_ids: jax.Array | None


@struct.dataclass
class DecodeState:
  """The loop's state; `token` is sampled, but not yet run.

  Attributes:
    step: int32, number of tokens sampled for each row that goes on.
    token: `[B]` int32, the last one.
    done: `[B]` bool.
    tokens: as in `Completions`; so are the next three.
    mask: see there.
    logprobs: see there.
    expert_ids: see there.
    cache: the KV cache.
    keys: `[B]` keys, one for each row.
  """

  step: jax.Array
  token: jax.Array
  done: jax.Array
  tokens: jax.Array
  mask: jax.Array
  logprobs: jax.Array
  expert_ids: jax.Array | None
  cache: kv_cache.KVCache
  keys: jax.Array


def pad_prompts(
    prompts: Sequence[Sequence[int]],
) -> tuple[np.ndarray, np.ndarray]:
  """Returns prompts `[B, P]`, padded on the right, and their lengths `[B]`.

  P is a power of two, so that a handful of lengths are compiled.

  Raises:
    ValueError: no prompt, or an empty one.
  """
  if not prompts:
    raise ValueError('No prompts were given.')
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  if lengths.min() < 1:
    raise ValueError(f'Prompt {int(lengths.argmin())} is empty.')
  size = max(_SMALLEST_BUCKET, 1 << int(lengths.max() - 1).bit_length())
  tokens = np.full((len(prompts), size), PAD, np.int32)
  for row, prompt in zip(tokens, prompts, strict=True):
    row[: len(prompt)] = prompt
  return tokens, lengths


def generate(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    prompts: jax.typing.ArrayLike,
    lengths: jax.typing.ArrayLike,
    key: jax.Array,
    sample: SampleConfig,
) -> Completions:
  """Samples one completion for every prompt.

  Args:
    config: the model.
    params: `quantize_params(quantizer, masters)`; the tree that runs.
    quantizer: the same quantizer.
    prompts: `[B, P]` int32, padded on the right (`pad_prompts`).
    lengths: `[B]` int32 prompt lengths.
    key: randomness.
    sample: lengths, EOS and temperature.

  Returns:
    The completions.

  Raises:
    ValueError: no rows, a prompt and its completion do not fit the cache, or
      experts are to be recorded in a model without.
  """
  prompts, lengths = jnp.asarray(prompts), jnp.asarray(lengths)
  if prompts.ndim != 2 or not prompts.shape[0]:
    raise ValueError(f'prompts has shape {prompts.shape}, not [B, P], B > 0.')
  needed = prompts.shape[1] + sample.max_new_tokens
  if sample.cache_length is not None and needed > sample.cache_length:
    raise ValueError(
        f'A prompt of (padded) length {prompts.shape[1]} and'
        f' {sample.max_new_tokens} new tokens do not fit a cache of'
        f' {sample.cache_length} positions.'
    )
  if sample.record_experts and not config.num_experts:
    raise ValueError('record_experts: the model has no experts.')
  # The temperature is traced, so that greedy evaluation is the same program.
  return generate_at(
      config,
      params,
      quantizer,
      prompts,
      lengths,
      key,
      jnp.float32(sample.temperature),
      dataclasses.replace(sample, temperature=1.0),
  )


def init_cache(
    config: model_config.ModelConfig,
    precision_policy: policy.PrecisionPolicy,
    batch: int,
    length: int,
) -> kv_cache.KVCache:
  """Returns an empty cache for `length` positions, in whole blocks."""
  return kv_cache.init(
      config.num_layers,
      batch,
      config.num_kv_heads,
      -(-length // config.attention_block) * config.attention_block,
      config.head_dim,
      config.dtype,
      kv_cache.SPECS[precision_policy.kv_cache],
  )


@functools.partial(jax.jit, static_argnames=('config', 'sample'))
def generate_at(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    prompts: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    sample: SampleConfig,
) -> Completions:
  """Returns what `generate` does, at a temperature that may be traced.

  Nothing is checked, and the temperature of `sample` is not looked at. It can
  be called under vmap and inside of another program.
  """
  batch, prompt_length = prompts.shape
  needed = prompt_length + sample.max_new_tokens
  length = sample.cache_length or needed
  cache = init_cache(config, quantizer.policy, batch, length)
  hidden, cache, experts = transformer.prefill(
      config, params, prompts, lengths, quantizer, cache
  )
  if sample.record_experts:
    experts = _clear_padding(experts, lengths, needed)
  state = DecodeState(
      step=jnp.int32(0),
      token=jnp.zeros((batch,), jnp.int32),
      done=jnp.zeros((batch,), bool),
      tokens=jnp.pad(prompts, ((0, 0), (0, sample.max_new_tokens))),
      mask=jnp.zeros((batch, needed), bool),
      logprobs=jnp.zeros((batch, needed), jnp.float32),
      expert_ids=experts if sample.record_experts else None,
      cache=cache,
      keys=jax.random.split(key, batch),
  )
  state = _sample_token(params, hidden, state, temperature, sample)
  capacity = kv_cache.capacity(cache)
  for live in live_lengths(config, prompt_length, capacity):
    state = _decode_while_shorter(
        config, params, quantizer, state, temperature, sample, live
    )
  return Completions(
      tokens=state.tokens,
      mask=state.mask,
      logprobs=state.logprobs,
      truncated=~state.done,
      expert_ids=state.expert_ids,
  )


def _clear_padding(experts, lengths, needed):
  """Returns the prompts' experts, 0 on padding, in room for completions."""
  live = jnp.arange(experts.shape[1]) < lengths[:, None]
  experts = jnp.where(live[:, :, None, None], experts, 0)
  room = needed - experts.shape[1]
  return jnp.pad(experts, ((0, 0), (0, room), (0, 0), (0, 0)))


def live_lengths(
    config: model_config.ModelConfig, prompt_length: int, cache_length: int
) -> Iterator[int]:
  """Yields how much of the cache is attended to, doubling up to all of it.

  Decoding goes on to the next one when a running row does not fit any more.

  Args:
    config: the model.
    prompt_length: of the padded prompts.
    cache_length: of the whole cache.
  """
  live = config.attention_block
  while live < min(prompt_length + 1, cache_length):
    live *= 2
  while live < cache_length:
    yield live
    live *= 2
  yield cache_length


def _decode_while_shorter(
    config, params, quantizer, state, temperature, sample, live
):
  """Decodes as long as every running row fits `live` positions."""

  def running(state):
    fits = jnp.max(jnp.where(state.done, 0, state.cache.lengths)) < live
    more = (state.step < sample.max_new_tokens) & ~jnp.all(state.done)
    return fits & more

  def body(state):
    hidden, cache, experts = transformer.decode_step(
        config, params, state.token, quantizer, state.cache, live
    )
    expert_ids = state.expert_ids
    if expert_ids is not None and experts is not None:
      rows = jnp.arange(state.token.size)
      end = expert_ids.shape[1]  # beyond it, nothing is written
      at = (rows, jnp.where(state.done, end, state.cache.lengths))
      expert_ids = expert_ids.at[at].set(experts[:, 0], mode='drop')
    state = dataclasses.replace(state, cache=cache, expert_ids=expert_ids)
    return _sample_token(params, hidden, state, temperature, sample)

  return lax.while_loop(running, body, state)


def _sample_token(params, hidden, state, temperature, sample):
  """Samples the token at each row's position `cache.lengths`."""
  logits = transformer.logits(params, hidden)
  greedy = temperature == 0
  positive = jnp.where(greedy, 1.0, temperature)
  keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.step)
  noise = jax.vmap(lambda key: jax.random.gumbel(key, logits.shape[-1:]))(keys)
  noise = jnp.where(greedy, 0.0, noise * positive)
  token = jnp.argmax(logits + noise, axis=-1)
  logprob, _ = layers.token_logprobs(logits, token, positive)
  logprob = jnp.where(greedy, 0.0, logprob)
  live = ~state.done
  token = jnp.where(live, token, PAD).astype(jnp.int32)
  rows = jnp.arange(token.size)
  at = (rows, jnp.where(live, state.cache.lengths, state.tokens.shape[1]))
  is_eos = jnp.isin(token, jnp.array(sample.eos_ids, jnp.int32))
  return dataclasses.replace(
      state,
      step=state.step + 1,
      token=token,
      done=state.done | is_eos,
      tokens=state.tokens.at[at].set(token, mode='drop'),
      mask=state.mask.at[at].set(True, mode='drop'),
      logprobs=state.logprobs.at[at].set(logprob, mode='drop'),
  )
