"""Checks of numbers alone: copies that differ, identical shards, broken ties, writes that were lost."""
