"""The views, one module each."""
