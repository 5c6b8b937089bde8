"""The map of a tensor, and the lines around it."""
