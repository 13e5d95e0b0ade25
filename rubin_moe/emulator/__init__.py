"""A functional emulator of PTX kernels. An island: imports nothing else of the package."""
