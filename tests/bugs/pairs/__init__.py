"""Healthy pairs: right programs of random sizes, meshes, styles and dtypes, each stepped beside its unsharded model."""
