"""The data that flows through a training step."""

from typing import Any

from flax import struct
import jax


@struct.dataclass
class Rollout:
  """Completions and their rewards.

  Attributes:
    tokens: `[B, T]` int32: prompt, completion, padding.
    completion_mask: `[B, T]` bool, the tokens that are trained.
    sampler_logprobs: `[B, T]` float32 of each completion token at sampling.
    temperature: float32 scalar, of the sampling distribution.
    rewards: `[B]` float32.
    group: `[B]` int32 in [0, B), which rows answer the same problem.
    version: `[B, T]` int32, learner step of the weights that made each token.
    valid: `[B]` bool, rows whose reward counts; None if all do. The others have
      left their group, and are not in `completion_mask`.
    expert_ids: `[B, T, L, k]` int32, the experts that each token went to while
      it was sampled, for the learner to replay; None if it chooses its own.
  """

  tokens: jax.Array
  completion_mask: jax.Array
  sampler_logprobs: jax.Array
  temperature: jax.Array
  rewards: jax.Array
  group: jax.Array
  version: jax.Array
  valid: jax.Array | None = None
  expert_ids: jax.Array | None = None


@struct.dataclass
class Batch:
  """What one update sees.

  Attributes:
    rollout: the rollout.
    advantages: `[B]` float32.
    old_logprobs: `[B, T]` float32, the learner's own log-probs at the sampling
      weights; None for a single update, which they are computed in.
    ref_logprobs: `[B, T]` float32 of the reference policy, or None.
  """

  rollout: Rollout
  advantages: jax.Array
  old_logprobs: jax.Array | None
  ref_logprobs: jax.Array | None


@struct.dataclass
class TrainState:
  """What an update changes.

  Attributes:
    step: int32, number of updates; the version of the weights.
    params: float32 masters, stacked into segments.
    opt_state: the optimizer's state.
  """

  step: jax.Array
  params: Any
  opt_state: Any
