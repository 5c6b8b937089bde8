"""The folder that `shardviz run` puts on PYTHONPATH: only what Python imports at startup."""
