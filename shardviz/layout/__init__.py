"""The oracle: which elements each coordinate holds, from mesh, placements and global shape."""
