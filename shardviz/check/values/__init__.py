"""Checks of numbers alone: differing copies, identical shards, broken ties, lost writes."""
