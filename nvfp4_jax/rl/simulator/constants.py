"""The numbers that the simulator stands on, each with its source.

Three kinds: *published* (miniTE, Miles: named), *measured* (rows that this
project committed: file and row named) and *inferred* (ours; the sentence says
what it was chosen for). Experiments and readers may disagree with the last
kind: `experiments.simulator range` says how far the story holds.

Sources. miniTE: "Diagnosing and Bridging the Execution Gap in Native NVFP4 RL",
mean |learner - sampler log-prob| at step 0, in nats. Miles: the Miles team's
post of 2026-07-29, its scripts and issues. Matrix:
results/mismatch_matrix/smollm2_h200/metrics.jsonl, field `mean` of the row
(cause, learner, sampler). Modes: results/backward_modes/metrics.jsonl. Errors:
results/quantization_error/metrics.jsonl.
"""

import math

PRECISIONS = ('bf16', 'mxfp8', 'nvfp4_w4a16', 'nvfp4_w4a8', 'nvfp4_w4a4')

# Measured (Matrix): |learner - sampler|, [learner][sampler] in the order of
# PRECISIONS; the diagonal is one policy, 0 bit for bit. Rows: cause `formats`
# for bf16, mxfp8 and nvfp4 (= W4A4 per token); `activations` for bf16 / w4a16,
# bf16 / w4a8, w4a16 / w4a8, w4a16 / nvfp4. Inferred, for want of a row:
# (w4a16, bf16), (w4a8, bf16) and (w4a8, w4a16) by symmetry; mxfp8 beside w4a16
# or w4a8 as bf16 beside them; (w4a8, nvfp4) and (nvfp4, w4a8 or w4a16) as
# (w4a16, nvfp4).
SMOLLM2 = (
    (0.0, 0.17848, 0.50012, 0.50116, 0.75021),
    (0.16543, 0.0, 0.50012, 0.50116, 0.76838),
    (0.50012, 0.50012, 0.0, 0.12137, 0.48155),
    (0.50116, 0.50116, 0.12137, 0.0, 0.48155),
    (0.69430, 0.74091, 0.48155, 0.48155, 0.0),
)

# Published (miniTE), by (learner, sampler); which side is which is inferred.
# mxfp8 on both sides: Miles issue 512, Qwen3-30B-A3B,
# train_rollout_logprob_abs_diff .0255, used for dense too.
_MINITE = {
    'minite_dense': {
        ('bf16', 'bf16'): 0.0110,
        ('nvfp4_w4a4', 'nvfp4_w4a4'): 0.1142,
        ('nvfp4_w4a4', 'bf16'): 0.1376,
        ('bf16', 'nvfp4_w4a4'): 0.1690,
        ('nvfp4_w4a16', 'nvfp4_w4a16'): 0.0139,
        ('nvfp4_w4a8', 'nvfp4_w4a8'): 0.0363,
        ('mxfp8', 'mxfp8'): 0.0255,
    },
    'minite_moe': {
        ('bf16', 'bf16'): 0.0172,
        ('nvfp4_w4a4', 'nvfp4_w4a4'): 0.0668,
        ('nvfp4_w4a4', 'bf16'): 0.0621,
        ('bf16', 'nvfp4_w4a4'): 0.0747,
        ('nvfp4_w4a16', 'nvfp4_w4a16'): 0.0166,
        ('nvfp4_w4a8', 'nvfp4_w4a8'): 0.0227,
        ('mxfp8', 'mxfp8'): 0.0255,
    },
}


def _fill(published):
  """Returns a whole table.

  Inferred: SMOLLM2 scaled to the published bf16 / nvfp4, in quadrature with the
  published bf16 / bf16 of two engines.
  """
  floor = published['bf16', 'bf16']
  scale = published['bf16', 'nvfp4_w4a4'] / SMOLLM2[0][4]
  return tuple(
      tuple(
          published.get(
              (learner, sampler), math.hypot(floor, scale * SMOLLM2[i][j])
          )
          for j, sampler in enumerate(PRECISIONS)
      )
      for i, learner in enumerate(PRECISIONS)
  )


MISMATCH = {name: _fill(table) for name, table in _MINITE.items()}
MISMATCH['smollm2'] = SMOLLM2

# Measured (Matrix, cause `keep_last`, bf16 / last 2, 4 and 8 of 30 layers, each
# over bf16 / nvfp4): factor of the mismatch by the share of last layers in
# bf16. Between points linear, beyond the last one constant.
LAST_LAYERS = (
    (0.0, 1.0),
    (2 / 30, 0.70088 / 0.75021),
    (4 / 30, 0.67245 / 0.75021),
    (8 / 30, 0.63487 / 0.75021),
)
# Inferred, chosen so that it counts for about as much as the last layers: Miles
# shows a figure of an ablation, without numbers, and in MXFP8.
SHARED_EXPERTS = 0.85
# Measured (Errors, normal matrices, nvfp4 per token 20.429 dB, with 4/6 21.216
# dB): the ratio of amplitudes. The mismatch itself did not show it (Matrix,
# cause `four_over_six`: 4/6 both over nvfp4 is 1.00 +- .1), so it is off in
# every default.
FOUR_OVER_SIX = 10 ** ((20.429 - 21.216) / 20)
# Published (miniTE, dense): .0721 with FP8 keys and values, .0583 without; what
# was added in quadrature. Measured, ours (Matrix, `kv_cache`, bf16): .0721.
KV_FP8 = math.sqrt(0.0721**2 - 0.0583**2)

# Gradient noise of a quantized learner, by backward mode, over that of bf16.
# Measured (Modes, nvfp4): 1 + mean of dgrad and wgrad inconsistency, how far
# the gradients are from those of the function that was computed.
BACKWARD_NOISE = {
    'dequantized': 1 + (0.0023 + 0.0016) / 2,
    'high_precision': 1 + (0.0950 + 0.0919) / 2,
    'quantized': 1 + (0.1374 + 0.1911) / 2,
}

# Published (Miles): dense PFLOPS of a GPU in bf16, FP8, FP4.
PFLOPS = {
    'b200': (2.25, 4.5, 9.0),
    'b300': (2.25, 4.5, 13.5),
    'rubin': (4.0, 17.5, 35.0),
}
# Index into PFLOPS of the multiplications of each precision. W4A16 multiplies
# in bf16, W4A8 in FP8.
MULTIPLIES = {
    'bf16': 0,
    'mxfp8': 1,
    'nvfp4_w4a16': 0,
    'nvfp4_w4a8': 1,
    'nvfp4_w4a4': 2,
}
# What is lost of the ratio of PFLOPS (negative: won, by fewer bytes of
# weights), so that a B200 has these speeds over bf16. Published: W4A4 1.64
# (miniTE, rollout); W4A16 1.36 and MXFP8 1.36 / 1.04 (Miles issue 3308, decode
# of one token). Inferred: W4A8 1.45, between W4A16 and W4A4.
ROLLOUT_OVERHEAD = {
    'bf16': 0.0,
    'mxfp8': 1 - 1.36 / 1.04 / 2,
    'nvfp4_w4a16': 1 - 1.36,
    'nvfp4_w4a8': 1 - 1.45 / 2,
    'nvfp4_w4a4': 1 - 1.64 / 4,
}
# Published: W4A4 1.35 (miniTE, update, 1.33 to 1.37). Miles says that theirs is
# slower than bf16, without a number: `nvfp4_train_overhead` of the
# configuration. Inferred: MXFP8 1.2; W4A16 and W4A8, fake-quantized, .95.
TRAIN_OVERHEAD = {
    'bf16': 0.0,
    'mxfp8': 1 - 1.2 / 2,
    'nvfp4_w4a16': 1 - 0.95,
    'nvfp4_w4a8': 1 - 0.95 / 2,
    'nvfp4_w4a4': 1 - 1.35 / 4,
}

# Inferred: what a correction adds to what an update corrects, as a share. In
# prototypes of ours (not committed) a staleness of 16 left a reward of .66 to
# .80, and .75 to .89 with TIS; .25 has that direction, it is no fit.
CORRECTION = {'none': 0.0, 'clip': 0.1, 'tis': 0.25}
ROUTING_REPLAY = 1.15  # inferred; R3 has no number of its own anywhere
