"""Low-precision reinforcement learning that stays one policy.

One `policy.Quantizer` decides, layer by layer, how every tensor is quantized;
learner, sampler and checkpoint take it from there and nowhere else.
Import the modules: `from nvfp4_jax import quantization`.
"""

__version__ = '0.1.0'
