"""Grids that scroll: ids of a tensor, ranks of a mesh, numbers of a rank, a pipeline's schedule."""
