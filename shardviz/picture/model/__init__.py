"""The drawing model of all formats: each block's ranks, boundaries, colors and labels."""
