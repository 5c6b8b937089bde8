"""Faults and right programs that the rules were not set on: other modules, other kinds, other meshes."""
