"""The probes that come with shardviz, one per file."""
