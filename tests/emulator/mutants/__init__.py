"""Faults put into working kernels, to see that the emulator's rules find them."""
