"""One MoE layer from hidden states to the weighted sum: routing, experts."""
