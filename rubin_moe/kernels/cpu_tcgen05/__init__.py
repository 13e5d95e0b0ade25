"""The activation numerics of the tcgen05 backends, computed slowly on a CPU."""
