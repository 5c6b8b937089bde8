"""Causes of a training step that differs from the unsharded model's."""
