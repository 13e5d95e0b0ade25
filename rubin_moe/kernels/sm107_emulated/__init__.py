"""The sm_107a kernels on a CPU, instruction by instruction: for trying and testing, never for
speed."""
