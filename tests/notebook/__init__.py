"""What `shardviz.load` gives, as a script and as a notebook see it."""
