"""The unsharded model's step from the same weights and batch, as the reference."""
