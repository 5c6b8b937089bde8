"""The unsharded model's step, with which the sharded one is compared, from the same weights and batch."""
