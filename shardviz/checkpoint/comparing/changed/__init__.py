"""What became of a tensor between two checkpoints, read off its own values: another order, a factor, other sizes."""
