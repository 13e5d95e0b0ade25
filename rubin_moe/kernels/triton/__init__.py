"""Portable GPU kernels in Triton: any NVIDIA GPU from sm_80 to sm_90, and Triton's interpreter."""
