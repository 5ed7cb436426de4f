"""The learner: jitted GRPO updates on float32 masters."""

import dataclasses
import functools

import jax
from jax import lax
import jax.numpy as jnp
import optax

from nvfp4_jax import diagnostics
from nvfp4_jax import layers
from nvfp4_jax import policy
from nvfp4_jax.models import config as model_config
from nvfp4_jax.models import transformer
from nvfp4_jax.rl import advantages
from nvfp4_jax.rl import corrections
from nvfp4_jax.rl import losses
from nvfp4_jax.rl import metrics as mismatch_metrics
from nvfp4_jax.rl import triage
from nvfp4_jax.rl import types

type Metrics = dict[str, jax.Array]

_ROWS_MULTIPLE = 8  # of the rows of a chunk: nothing is padded for a matmul


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('learning_rate', 'grad_clip'),
    meta_fields=('b1', 'b2', 'weight_decay'),
)
@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """AdamW with global-norm clipping, as a pytree.

  Learning rate and clipping are leaves: changing them compiles nothing, and
  runs under vmap may each have their own. The rest is static.

  Attributes:
    learning_rate: constant.
    b1: decay of the first moment.
    b2: decay of the second moment.
    weight_decay: decoupled.
    grad_clip: largest global norm of a gradient; infinity never clips.
  """

  learning_rate: float = 1e-3
  b1: float = 0.9
  b2: float = 0.98
  weight_decay: float = 0.0
  grad_clip: float = 1.0


@dataclasses.dataclass(frozen=True)
class GRPOConfig:
  """What is learned from a rollout; static.

  Attributes:
    advantage: from rewards to advantages.
    loss: of the ratio of new to old policy, with KL and entropy terms.
    correction: weights for the mismatch of sampler and learner.
    segment_triage: further weights, by segments of a completion; None for none.
  """

  advantage: advantages.AdvantageConfig = advantages.AdvantageConfig()
  loss: losses.LossConfig = losses.LossConfig()
  correction: corrections.CorrectionConfig = corrections.CorrectionConfig()
  segment_triage: triage.TriageConfig | None = None


@dataclasses.dataclass(frozen=True)
class MemoryConfig:
  """How an update is computed in less memory; static.

  Attributes:
    micro_batches: rows of a batch are divided into so many parts, whose
      gradients are added in float32. Denominators are those of the whole batch.
      With activations that have one scale per tensor, and in column copies, a
      part's numbers depend on the part; otherwise sums only change their order.
    remat: compute the inside of each layer twice instead of keeping it.
  """

  micro_batches: int = 1
  remat: bool = False

  def __post_init__(self):
    if self.micro_batches < 1:
      raise ValueError(f'micro_batches {self.micro_batches} is below 1.')


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


@functools.partial(jax.jit, static_argnames=('config', 'micro_batches'))
def logprobs(
    config: model_config.ModelConfig,
    params: policy.ParamTree,
    quantizer: policy.Quantizer,
    quantized: policy.ParamTree,
    tokens: jax.Array,
    temperature: jax.typing.ArrayLike,
    *,
    expert_ids: jax.Array | None = None,
    micro_batches: int = 1,
) -> jax.Array:
  """Returns teacher-forced log-probs `[B, T]` of `tokens`; 0 at position 0.

  Args:
    config: the model.
    params: stacked masters, or the tree that runs.
    quantizer: the learner's.
    quantized: `quantize_params(quantizer, params)`.
    tokens: `[B, T]` int32.
    temperature: of the distribution.
    expert_ids: `[B, T, L, k]` to be replayed, or None.
    micro_batches: rows are run in so many parts, one after another.
  """

  def run(part):
    new, _ = _logprobs(
        config, params, quantizer, quantized, *part, temperature=temperature
    )
    return new

  rows = (tokens, expert_ids)
  if micro_batches == 1:
    return run(rows)
  return lax.map(run, _split(rows, micro_batches)).reshape(tokens.shape)


@functools.partial(
    jax.jit,
    static_argnames=('config', 'grpo', 'memory'),
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
    *,
    memory: MemoryConfig = MemoryConfig(),
) -> tuple[types.TrainState, Metrics]:
  """Makes one update, unless its gradient is not finite.

  Args:
    config: the model.
    optimizer: the optimizer.
    grpo: the loss.
    state: donated.
    quantizer: the learner's; its key is the run's.
    quantized: `quantize_params(quantizer, state.params)`.
    batch: what to learn from.
    memory: how to compute it.

  Returns:
    The new state and float32 scalar metrics. If the loss or the gradient's norm
    is not finite, the state is the old one, its step included, and the metric
    `skipped` is 1.

  Raises:
    ValueError: kl_coef is not 0 and the batch has no reference log-probs; the
      rows do not divide into micro-batches; or weights that depend on the whole
      batch have no `old_logprobs` to be computed from before it is divided.
  """
  denominator = losses.denominators(
      batch.rollout.completion_mask, grpo.loss.aggregation
  )
  weights = _weights_ahead(grpo, batch, memory)
  quantizer = policy.fold_in(quantizer, state.step)

  def loss_fn(params, part, weights, index):
    new, entropy = _logprobs(
        config,
        params,
        policy.fold_in(quantizer, index),
        quantized,
        part.rollout.tokens,
        part.rollout.expert_ids,
        temperature=batch.rollout.temperature,
        remat=memory.remat,
    )
    loss, _ = _loss(grpo, part, new, entropy, weights, denominator)
    return loss, (loss, new, entropy)

  gradient = jax.grad(loss_fn, has_aux=True)
  if memory.micro_batches == 1:
    gradients, aux = gradient(state.params, batch, weights, 0)
  else:
    gradients, aux = _accumulate(
        lambda part: gradient(state.params, *part),
        state.params,
        _split_batch(batch, weights, memory.micro_batches),
    )
  loss, new, entropy = aux
  shape = batch.rollout.tokens.shape
  new, entropy = new.reshape(shape), entropy.reshape(shape)
  _, metrics = _loss(grpo, batch, new, entropy, weights, denominator)
  state, grad_norm, applied = _apply(optimizer, state, gradients, jnp.sum(loss))
  skipped = 1.0 - applied.astype(jnp.float32)
  metrics |= {'grad_norm': grad_norm, 'skipped': skipped}
  return state, {name: x.astype(jnp.float32) for name, x in metrics.items()}


@functools.partial(jax.jit, static_argnames='config', donate_argnames='state')
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
    new, _ = _logprobs(
        config, params, bf16, None, tokens, None, temperature=1.0
    )
    return -losses.token_mean(new, mask)

  loss, gradients = jax.value_and_grad(loss_fn)(state.params)
  state, grad_norm, _ = _apply(optimizer, state, gradients, loss)
  return state, {'loss': loss, 'grad_norm': grad_norm}


def _logprobs(
    config,
    params,
    quantizer,
    quantized,
    tokens,
    expert_ids,
    *,
    temperature,
    remat=False,
):
  """Returns log-probs and entropies `[B, T]`, 0 at position 0."""
  hidden = transformer.forward(
      config,
      params,
      tokens,
      quantizer,
      quantized=quantized,
      expert_ids=expert_ids,
      remat=remat,
  )
  new, entropy = _in_chunks(
      lambda h, t: layers.token_logprobs(
          transformer.logits(params, h), t, temperature
      ),
      hidden[:, :-1],
      tokens[:, 1:],
      _logits_per_chunk() // config.vocab_size,
  )
  shift = lambda x: jnp.pad(x, ((0, 0), (1, 0)))
  return shift(new), shift(entropy)


def _logits_per_chunk():
  """Returns how many float32 logits are in memory at once.

  32 MiB suit a CPU's caches. Elsewhere it is 512: each chunk passes over the
  gradient of the whole table, which is what it costs there.
  """
  return 2**23 if jax.default_backend() == 'cpu' else 2**27


def _in_chunks(fn, hidden, tokens, size):
  """Returns `fn(hidden, tokens)`, computed for at most `size` rows at a time.

  Logits of all tokens are never in memory at once, in the gradient neither.
  """
  rows = tokens.size
  size = max(size // _ROWS_MULTIPLE, 1) * _ROWS_MULTIPLE
  if rows <= size:
    return fn(hidden, tokens)
  pad = -rows % size
  flat = jnp.pad(hidden.reshape(rows, -1), ((0, pad), (0, 0)))
  chunks = (
      flat.reshape(-1, size, hidden.shape[-1]),
      jnp.pad(tokens.reshape(rows), (0, pad)).reshape(-1, size),
  )
  results = lax.map(jax.checkpoint(lambda chunk: fn(*chunk)), chunks)
  return tuple(x.reshape(-1)[:rows].reshape(tokens.shape) for x in results)


def _weights_ahead(grpo, batch, memory):
  """Returns the weights of all tokens, if `old_logprobs` are known; or None."""
  if batch.old_logprobs is not None:
    return _weights(grpo, batch, batch.old_logprobs)[0]
  whole = grpo.correction.normalize or (
      grpo.segment_triage is not None
      and grpo.segment_triage.quantile is not None
  )
  if whole and memory.micro_batches > 1:
    raise ValueError(
        'Weights that depend on the whole batch (normalize, quantile) need'
        ' old_logprobs where it is divided into micro-batches.'
    )
  return None


def _weights(grpo, batch, old):
  """Returns the weight of each token for the mismatch, and metrics."""
  rollout = batch.rollout
  args = (old, rollout.sampler_logprobs, rollout.completion_mask)
  correction = corrections.correct(
      grpo.correction, *args, advantages=batch.advantages
  )
  if grpo.segment_triage is None:
    return correction.weights, correction.metrics
  triaged = triage.triage(grpo.segment_triage, *args, batch.advantages)
  weights = correction.weights * triaged.weights
  return weights, correction.metrics | triaged.metrics


def _loss(grpo, batch, new, entropy, weights, denominator):
  rollout, mask = batch.rollout, batch.rollout.completion_mask
  old = batch.old_logprobs
  old = lax.stop_gradient(new) if old is None else old
  own_weights, metrics = _weights(grpo, batch, old)
  loss, loss_metrics = losses.policy_loss(
      grpo.loss,
      new,
      old,
      batch.advantages,
      mask,
      weights=own_weights if weights is None else weights,
      ref_logprobs=batch.ref_logprobs,
      entropies=entropy,
      denominator=denominator,
  )
  metrics |= _mismatch(grpo, rollout, old) | loss_metrics
  metrics['clip_fraction'] = metrics.pop('pg_clipfrac')
  if batch.ref_logprobs is not None:
    references = (batch.ref_logprobs, new, mask)
    metrics['ref_kl'] = diagnostics.kl_k3(*references)
    metrics['ref_kl_median'] = diagnostics.kl_median(*references)
  return loss, lax.stop_gradient(metrics)


def _mismatch(grpo, rollout, old):
  """Returns the mismatch, its two chief measures under this project's names."""
  row = mismatch_metrics.mismatch(
      old,
      rollout.sampler_logprobs,
      rollout.completion_mask,
      cap=grpo.correction.cap,
  )
  row['mismatch_abs_logprob'] = row.pop('train_rollout_logprob_abs_diff')
  row['mismatch_kl'] = row.pop('train_rollout_kl')
  row['mismatch_ratio_clamped'] = row.pop('ratio_clamped')
  return row


def _split(tree, parts):
  """Returns every array of `[B, ...]` as `[parts, B / parts, ...]`."""

  def split(x):
    if x.shape[0] % parts:
      raise ValueError(f'{x.shape[0]} rows do not make {parts} micro-batches.')
    return x.reshape(parts, -1, *x.shape[1:])

  return jax.tree.map(split, tree)


def _split_batch(batch, weights, parts):
  temperature = batch.rollout.temperature
  rollout = dataclasses.replace(batch.rollout, temperature=None)
  batch, weights = _split(
      (dataclasses.replace(batch, rollout=rollout), weights), parts
  )
  repeated = jnp.broadcast_to(temperature, (parts,))
  rollout = dataclasses.replace(batch.rollout, temperature=repeated)
  batch = dataclasses.replace(batch, rollout=rollout)
  return batch, weights, jnp.arange(parts)


def _accumulate(gradient, params, parts):
  """Returns the sum of the gradients of all parts, and what else they give."""

  def add(total, part):
    gradients, aux = gradient(part)
    return jax.tree.map(jnp.add, total, gradients), aux

  return lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)


def _apply(optimizer, state, gradients, loss):
  """Returns the state after an update, the norm, and whether it was applied."""
  updates, opt_state = make_optimizer(optimizer).update(
      gradients, state.opt_state, state.params
  )
  norm = optax.tree.norm(gradients)
  finite = jnp.isfinite(norm) & jnp.isfinite(loss)
  updated = types.TrainState(
      step=state.step + 1,
      params=optax.apply_updates(state.params, updates),
      opt_state=opt_state,
  )
  keep = lambda new, old: jnp.where(finite, new, old)
  return jax.tree.map(keep, updated, state), norm, finite
