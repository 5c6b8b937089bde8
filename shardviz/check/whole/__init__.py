"""Checks of a run as a whole: what its dump lacks, and ranks whose groups contradict the mesh."""
