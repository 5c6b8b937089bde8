"""The folder that `shardviz run` puts on a job's PYTHONPATH: nothing but what Python imports at its start."""
