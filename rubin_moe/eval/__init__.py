"""Quality of a model on held-out text: perplexity, and divergence from a 16-bit reference."""
