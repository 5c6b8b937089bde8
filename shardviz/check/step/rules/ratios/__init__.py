"""Results that are the unsharded model's times a number: a factor for each gradient, for all, for a norm; clipping."""
