"""Reinforcement learning: advantages, corrections, losses, learner, loop."""
