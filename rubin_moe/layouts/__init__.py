"""Physical orders of weights and scales, one per file; pure and invertible."""
