"""Every private torch API that shardviz uses is called from here, and nowhere else.

Each function's docstring names the torch versions it was tried on.
"""
