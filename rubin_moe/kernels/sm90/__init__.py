"""Hopper: a whole MoE layer at decode in one persistent launch, compiled for sm_90a."""
