"""Float64 reference, written from the formats' definitions and from nothing in `rubin_moe`."""
