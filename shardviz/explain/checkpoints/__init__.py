"""Causes in checkpoints: their files, conversions and optimizer states."""
