"""Causes of weights that are not where their placements say."""
