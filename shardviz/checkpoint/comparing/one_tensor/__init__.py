"""What became of one tensor, told from its two sides alone."""
