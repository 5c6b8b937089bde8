"""Checkpoint formats, each read without torch and without running code from a file."""
