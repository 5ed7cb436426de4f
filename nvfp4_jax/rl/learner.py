"""The learner: jitted GRPO updates on float32 masters."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax

from nvfp4_jax import diagnostics
from nvfp4_jax import layers
from nvfp4_jax import policy
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import losses
from nvfp4_jax.rl import types

type Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with global-norm clipping; static.

  Attributes:
    learning_rate: constant.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled.
    grad_clip: largest global norm of a gradient.
  """

  learning_rate: float = 1e-3
  b1: float = 0.9
  b2: float = 0.98
  weight_decay: float = 0.0
  grad_clip: float = 1.0


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
  """The loss; static.

  Attributes:
    clip_eps: lower clip of the ratio of new to old policy.
    clip_eps_high: upper clip.
    tis_cap: largest truncated importance weight of the mismatch ratio; None
      turns the correction off.
    kl_coef: weight of the k3 KL to the reference.
  """

  clip_eps: float = 0.2
  clip_eps_high: float = 0.28
  tis_cap: float | None = 2.0
  kl_coef: float = 0.0


def init_state(
    params: policy.ParamTree, optimizer: OptimizerConfig
) -> types.TrainState:
  """Returns the state at step 0, for stacked float32 masters."""
  return types.TrainState(
      step=jnp.int32(0),
      params=params,
      opt_state=make_optimizer(optimizer).init(params),
  )


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
  """Returns the optax chain of an OptimizerConfig."""
  return optax.chain(
      optax.clip_by_global_norm(config.grad_clip),
      optax.adamw(
          config.learning_rate,
          b1=config.b1,
          b2=config.b2,
          weight_decay=config.weight_decay,
      ),
  )


@functools.partial(jax.jit, static_argnames='config')
def logprobs(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    quantized: policy.ParamTree,
    tokens: jax.Array,
    temperature: jax.typing.ArrayLike,
) -> jax.Array:
  """Returns teacher-forced log-probs `[B, T]` of `tokens`; 0 at position 0."""
  return _logprobs(config, params, quantizer, quantized, tokens, temperature)[0]


@functools.partial(
    jax.jit,
    static_argnames=('config', 'optimizer', 'grpo'),
    donate_argnames='state',
)
def train_step(
    config: model_config.ModelConfig,
    optimizer: OptimizerConfig,
    grpo: GRPOConfig,
    state: types.TrainState,
    quantizer: policy.Quantizer,
    quantized: policy.ParamTree,
    batch: types.Batch,
) -> tuple[types.TrainState, Metrics]:
  """Makes one update.

  Args:
    config: the model.
    optimizer: the optimizer.
    grpo: the loss.
    state: donated.
    quantizer: the learner's.
    quantized: `quantize_params(quantizer, state.params)`.
    batch: what to learn from.

  Returns:
    The new state and float32 scalar metrics.

  Raises:
    ValueError: kl_coef is not 0 and the batch has no reference log-probs.
  """

  def loss_fn(params):
    new, entropy = _logprobs(
        config,
        params,
        quantizer,
        quantized,
        batch.rollout.tokens,
        batch.rollout.temperature,
    )
    return _loss(grpo, batch, new, entropy)

  gradients, metrics = jax.grad(loss_fn, has_aux=True)(state.params)
  state, grad_norm = _apply(optimizer, state, gradients)
  return state, metrics | {'grad_norm': grad_norm}


@functools.partial(
    jax.jit, static_argnames=('config', 'optimizer'), donate_argnames='state'
)
def supervised_step(
    config: model_config.ModelConfig,
    optimizer: OptimizerConfig,
    state: types.TrainState,
    tokens: jax.Array,
    mask: jax.Array,
) -> tuple[types.TrainState, Metrics]:
  """Makes one maximum-likelihood update in plain bfloat16.

  Args:
    config: the model.
    optimizer: the optimizer.
    state: donated.
    tokens: `[B, T]` int32.
    mask: `[B, T]` bool, the tokens to learn.

  Returns:
    The new state and the metrics `loss` (nats a token) and `grad_norm`.
  """
  bf16 = policy.Quantizer(policy.BF16)

  def loss_fn(params):
    new, _ = _logprobs(config, params, bf16, None, tokens, 1.0)
    return -losses.token_mean(new, mask)

  loss, gradients = jax.value_and_grad(loss_fn)(state.params)
  state, grad_norm = _apply(optimizer, state, gradients)
  return state, {'loss': loss, 'grad_norm': grad_norm}


def _logprobs(config, params, quantizer, quantized, tokens, temperature):
  hidden = transformer.forward(
      config, params, tokens, quantizer, quantized=quantized
  )
  logits = transformer.logits(params, hidden[:, :-1])
  new, entropy = layers.token_logprobs(logits, tokens[:, 1:], temperature)
  shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
  return shift(new), shift(jax.lax.stop_gradient(entropy))


def _loss(grpo, batch, new, entropy):
  rollout, mask = batch.rollout, batch.rollout.completion_mask
  sampler = rollout.sampler_logprobs
  old = batch.old_logprobs
  old = jax.lax.stop_gradient(new) if old is None else old
  surrogate = losses.clipped_surrogate(
      new,
      old,
      jnp.broadcast_to(batch.advantages[:, None], new.shape),
      mask,
      clip_eps=grpo.clip_eps,
      clip_eps_high=grpo.clip_eps_high,
  )
  weights = jnp.ones_like(new)
  if grpo.tis_cap is not None:
    weights = corrections.token_tis(old, sampler, mask, cap=grpo.tis_cap)
  loss = losses.token_mean(weights * surrogate.loss, mask)
  metrics = {
      'clip_fraction': losses.token_mean(
          surrogate.clipped.astype(jnp.float32), mask
      ),
      'tis_weight_mean': losses.token_mean(weights, mask),
      'entropy': losses.token_mean(entropy, mask),
      'mismatch_abs_logprob': diagnostics.logprob_gap(old, sampler, mask),
      'mismatch_kl': diagnostics.kl_k3(old, sampler, mask),
  }
  if batch.ref_logprobs is None and grpo.kl_coef:
    raise ValueError(f'kl_coef {grpo.kl_coef} needs ref_logprobs.')
  if batch.ref_logprobs is not None:
    ref_kl = diagnostics.kl_k3(batch.ref_logprobs, new, mask)
    loss = loss + grpo.kl_coef * ref_kl
    metrics['ref_kl'] = jax.lax.stop_gradient(ref_kl)
  return loss, metrics


def _apply(optimizer, state, gradients):
  updates, opt_state = make_optimizer(optimizer).update(
      gradients, state.opt_state, state.params
  )
  state = types.TrainState(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
  )
  return state, optax.tree.norm(gradients)
