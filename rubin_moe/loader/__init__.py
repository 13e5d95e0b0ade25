"""Checkpoints on disk to `formats.experts.ExpertWeights`: dialects, folding, sharding."""
