"""The formats of checkpoints, each read without torch, and without running anything of a file."""
