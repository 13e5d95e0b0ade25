"""Kernels that others wrote, run unchanged on the emulator as a conformance suite.

They come from the wheel `flashinfer-python` 0.7.4, of which nothing but kernel sources is used;
their PTX is made when a test runs and is never stored.
"""
