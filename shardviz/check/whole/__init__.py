"""Checks of a run as a whole: what its dump lacks, and groups that contradict the mesh."""
