"""Rubin: swap-AB grouped GEMMs, compiled for sm_107a."""
