"""The numerics of Hopper's FP8 kernels, computed slowly on a CPU."""
