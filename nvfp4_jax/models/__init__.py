"""Decoder models: configuration, parameters and forward pass."""
