"""The first wrong line: programs whose fault is at a known line, and their right twins."""
