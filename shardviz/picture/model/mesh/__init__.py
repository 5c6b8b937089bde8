"""Ranks on their mesh: the cell of each, its number as heat, and short labels for sets of them."""
