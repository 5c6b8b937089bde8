"""Megatron-core: layers born split, experts by global number, and how weights are saved."""
