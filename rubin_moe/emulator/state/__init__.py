"""Machine state: warp registers, memories, barriers, tensor memory, tensor maps."""
