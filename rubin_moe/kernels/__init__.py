"""Grouped GEMM kernels and what selects among them."""
