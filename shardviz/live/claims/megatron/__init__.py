"""Megatron-core: layers that are born split, experts by their global numbers, and how it saves each weight."""
