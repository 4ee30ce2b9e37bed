"""Metrics: pure functions on tensors and arrays, for training and evaluation alike."""
