"""Parts of CuTe DSL kernels that architectures share."""
