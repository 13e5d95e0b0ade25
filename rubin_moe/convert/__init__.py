"""Converting and comparing checkpoints, shard by shard."""
