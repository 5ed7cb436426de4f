"""The functions of rl/ in float64 numpy, one token or group at a time.

Written from the formulas, with loops where the package has segment sums, and
with gradients by hand. Only trained, finite entries are ever read.
"""

import math

import numpy as np


def held(x, limit=20.0):
  return min(max(x, -limit), limit)


def advantages(
    estimator, rewards, group, valid=None, mask=None, ddof=1, eps=1e-6
):
  rewards = np.asarray(rewards, np.float64)
  valid = np.ones(len(rewards), bool) if valid is None else valid
  result = np.zeros(len(rewards))
  rows_of = lambda name: [
      i for i in range(len(rewards)) if valid[i] and group[i] == name
  ]
  if estimator == 'reinforce_pp':
    rows = [i for i in range(len(rewards)) if valid[i]]
    return _whiten(rewards, rows, mask, ddof, eps)
  centered = np.zeros(len(rewards))
  for name in set(group.tolist()):
    rows = rows_of(name)
    for i in rows:
      centered[i] = rewards[i] - np.mean(rewards[rows])
  if estimator == 'reinforce_pp_baseline':
    rows = [i for i in range(len(rewards)) if valid[i]]
    whitened = _whiten(centered, rows, mask, ddof, eps)
  for name in set(group.tolist()):
    rows = rows_of(name)
    if not rows or max(rewards[rows]) == min(rewards[rows]):
      continue
    for i in rows:
      others = [j for j in rows if j != i]
      if estimator == 'grpo':
        result[i] = centered[i] / (np.std(rewards[rows], ddof=ddof) + eps)
      elif estimator == 'leave_one_out':
        result[i] = rewards[i] - np.mean(rewards[others])
      elif estimator == 'dr_grpo':
        result[i] = centered[i]
      else:
        result[i] = whitened[i]
  return result


def _whiten(values, rows, mask, ddof, eps):
  repeated = [values[i] for i in rows for _ in range(int(mask[i].sum()))]
  result = np.zeros(len(values))
  if not repeated or max(repeated) == min(repeated):
    return result
  for i in rows:
    if mask[i].any():
      scale = np.std(repeated, ddof=ddof) + eps
      result[i] = (values[i] - np.mean(repeated)) / scale
  return result


def group_metrics(rewards, group, valid):
  kept = {}
  for reward, name, fine in zip(rewards, group, valid, strict=True):
    if fine:
      kept.setdefault(int(name), []).append(float(reward))
  every = [r for rs in kept.values() for r in rs]
  skipped = sum(max(rs) == min(rs) for rs in kept.values())
  return {
      'groups': len(kept),
      'groups_skipped': skipped,
      'samples_rejected': len(rewards) - len(every),
      'frac_reward_zero_std': skipped / max(len(kept), 1),
      'reward_mean': np.mean(every) if every else 0.0,
      'reward_std': np.std(every, ddof=1) if len(every) > 1 else 0.0,
  }


def overlong(length, max_length, cache):
  if length <= max_length - cache:
    return 0.0
  if length > max_length:
    return -1.0
  return ((max_length - cache) - length) / cache


def surrogate(kind, new, old, advantage, mask, low, high, dual=None):
  """Returns loss, gradient in new, clipped low, high, dual; and a count."""
  shape = mask.shape
  out = {
      'loss': np.zeros(shape),
      'gradient': np.zeros(shape),
      'clipped_low': np.zeros(shape, bool),
      'clipped_high': np.zeros(shape, bool),
      'clipped_dual': np.zeros(shape, bool),
      'ratio_clamped': 0,
  }
  for i, t in zip(*np.nonzero(mask), strict=True):
    a = float(advantage[i, t])
    if kind in ('gspo', 'tbpo'):
      live = np.nonzero(mask[i])[0]
      x = np.mean([float(new[i, s]) - float(old[i, s]) for s in live])
      limit = 10.0
    else:
      x, limit = float(new[i, t]) - float(old[i, t]), 20.0
    is_held = abs(x) > limit
    out['ratio_clamped'] += is_held
    r = math.exp(held(x, limit))
    if kind == 'cispo':
      weight = min(r, 1 + high)
      out['loss'][i, t] = -weight * a * float(new[i, t])
      out['gradient'][i, t] = -weight * a
      out['clipped_high'][i, t] = r > 1 + high
      continue
    gradient = 0.0 if is_held else -r * a
    loss = -r * a
    if a < 0 and r < 1 - low:
      loss, gradient = -(1 - low) * a, 0.0
      out['clipped_low'][i, t] = True
    if a > 0 and r > 1 + high:
      loss, gradient = -(1 + high) * a, 0.0
      out['clipped_high'][i, t] = True
    if dual is not None and a < 0 and r > dual:
      loss, gradient = -dual * a, 0.0
      out['clipped_dual'][i, t] = True
    out['loss'][i, t], out['gradient'][i, t] = loss, gradient
  return out


def aggregate(values, mask, aggregation, norm_length=None):
  rows = [
      [float(v) for v, m in zip(vs, ms, strict=True) if m]
      for vs, ms in zip(values, mask, strict=True)
  ]
  rows = [row for row in rows if row]
  if not rows:
    return 0.0
  if aggregation == 'token_mean':
    return np.mean(np.concatenate(rows))
  per_row = {
      'seq_mean_token_mean': np.mean,
      'seq_mean_token_sum': np.sum,
      'seq_mean_token_sum_norm': lambda row: np.sum(row) / norm_length,
  }[aggregation]
  return np.mean([per_row(row) for row in rows])


def kl(kind, gradient, new, ref, old=None):
  """Returns value and gradient in new of one token."""
  x = new - ref
  e = math.exp(held(-x))
  is_held = abs(x) > 20
  value, slope = {
      'k1': (x, 1.0),
      'k2': (x * x / 2, x),
  }.get(kind, (e - 1 - held(-x), 0.0 if is_held else 1 - e))
  is_low = kind == 'low_var_kl'
  if gradient == 'importance':
    r = math.exp(held(new - old))
    d = 0.0 if abs(new - old) > 20 else r
    value, slope = value * r, slope * r + value * d
  if is_low and value > 10:
    value, slope = 10.0, 0.0
  if gradient == 'score':
    slope += value
  if gradient == 'k2':
    slope = x
  return value, slope


def correction(config, learner, sampler, mask, advantage):
  """Returns weights and the mask of what is kept."""
  live = mask & np.isfinite(learner) & np.isfinite(sampler)
  weights, kept = np.ones(mask.shape), mask.copy()
  for i in range(len(mask)):
    ts = np.nonzero(live[i])[0]
    gaps = [float(learner[i, t]) - float(sampler[i, t]) for t in ts]
    for t, gap in zip(ts, gaps, strict=True):
      x = {'none': 0.0, 'token': gap, 'sequence': sum(gaps)}[config.weights]
      cap = math.inf if config.cap is None else config.cap
      weights[i, t] = min(math.exp(held(x)), cap)
      if config.token_bounds is not None:
        low, high = config.token_bounds
        kept[i, t] &= low <= math.exp(gap) <= high
    mean = np.mean(gaps) if gaps else 0.0
    if config.sequence_bounds is not None:
      low, high = config.sequence_bounds
      level = mean if config.sequence_level == 'geometric' else sum(gaps)
      kept[i] &= low <= math.exp(level) <= high
    if config.veto is not None:
      kept[i] &= not any(math.exp(gap) < config.veto for gap in gaps)
    if config.opsm_delta is not None and advantage[i] < 0:
      kept[i] &= -mean <= config.opsm_delta
  if config.normalize and live.any():
    weights[live] /= np.mean(weights[live])
  weights[mask & ~kept] = 0.0
  return weights, kept


def triage(config, learner, sampler, mask, advantage):
  """Returns weights, segment numbers and metrics."""
  live = mask & np.isfinite(learner) & np.isfinite(sampler)
  gap = np.zeros(mask.shape)
  gap[live] = learner[live].astype(np.float64) - sampler[live]
  threshold = config.threshold
  if threshold is None:
    ranked = sorted(np.abs(gap[live]))
    threshold = ranked[math.ceil(config.quantile * len(ranked)) - 1]
  weights, segments = np.ones(mask.shape), np.zeros(mask.shape, int)
  lengths, mass = [], {}
  for i in range(len(mask)):
    tails = [t for t in np.nonzero(live[i])[0] if abs(gap[i, t]) > threshold]
    run = []
    for t in range(mask.shape[1] + 1):
      near = any(abs(t - s) <= config.window for s in tails)
      if t < mask.shape[1] and live[i, t] and near:
        run.append(t)
      elif run:
        lengths.append(len(run))
        segments[i, run] = len(lengths)
        masses = [advantage[i] * gap[i, s] for s in run]
        size = sum(map(abs, masses))
        if size:
          weights[i, run] = 1 - config.strength * sum(masses) / size
        run = []
  severe = live & (np.abs(gap) > config.severe)
  weights[severe] *= np.clip(np.exp(gap[severe]), *config.repair_bounds)
  for i, t in zip(*np.nonzero(live), strict=True):
    if advantage[i] and gap[i, t]:
      sign = lambda x: 'positive' if x > 0 else 'negative'
      name = f'{sign(advantage[i])}_{sign(gap[i, t])}'
      mass[name] = mass.get(name, 0.0) + abs(advantage[i] * gap[i, t])
  whole = sum(mass.values())
  metrics = {f'triage_mass_{k}': v / whole for k, v in mass.items()}
  metrics |= {
      'triage_segments': len(lengths),
      'triage_segment_length': np.mean(lengths) if lengths else 0.0,
      'triage_segment_length_max': max(lengths, default=0),
      'triage_repaired': severe.sum(),
      'triage_touched': ((segments > 0) | severe).sum() / max(live.sum(), 1),
      'triage_weight_mean': np.mean(weights[live]) if live.any() else 0.0,
      'missing_logprobs': (mask & ~live).sum(),
  }
  return weights, segments, metrics


def mismatch(learner, sampler, mask, cap):
  live = mask & np.isfinite(learner) & np.isfinite(sampler)
  a, b = learner[live].astype(np.float64), sampler[live].astype(np.float64)
  gap = a - b
  w = np.exp(np.clip(gap, -20, 20))
  return {
      'train_rollout_logprob_abs_diff': np.mean(np.abs(gap)),
      'train_rollout_logprob_abs_diff_max': np.max(np.abs(gap)),
      'train_rollout_k1': np.mean(b - a),
      'train_rollout_kl': np.mean(w - 1 - np.clip(gap, -20, 20)),
      'token_mult_prob_error': np.mean(np.exp(np.clip(np.abs(gap), 0, 20))),
      'ess_ratio': np.sum(w) ** 2 / (len(w) * np.sum(w**2)),
      'chi_square': np.mean(w**2) - 1,
      'logprob_pearson': np.corrcoef(a, b)[0, 1],
      'tis_clipfrac': np.mean(w > cap),
      'ratio_clamped': np.sum(np.abs(gap) > 20),
      'missing_logprobs': np.sum(mask & ~live),
  }


def ragged(seed, shape=(6, 9), scale=0.3, bad=False):
  """Returns two log-probs, advantages `[B]` and a mask with an empty row.

  Masked entries are NaN or infinite; with `bad`, a few trained ones too.
  """
  rng = np.random.default_rng(seed)
  b = -rng.exponential(size=shape)
  a = b + rng.normal(size=shape) * scale
  mask = rng.random(shape) < 0.8
  mask &= np.arange(shape[1]) < rng.integers(1, shape[1] + 1, (shape[0], 1))
  mask[rng.integers(shape[0])] = False
  junk = np.array([np.nan, np.inf, -np.inf, 1e30])
  for x in (a, b):
    x[~mask] = rng.choice(junk, np.sum(~mask))
    if bad:
      x[mask & (rng.random(shape) < 0.1)] = rng.choice(junk[:3])
  advantage = rng.normal(size=shape[0])
  return np.float32(a), np.float32(b), np.float32(advantage), mask
