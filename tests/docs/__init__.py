"""The site of documentation, made of the demos, the catalogue of causes and the docstrings: `make docs`."""
