"""The native runtime: functions that compiled kernels call, and their compilation and cache."""
