"""The oracle: a mesh, placements and a global shape say which elements every coordinate holds. No torch, no files."""
