"""Published models at their published sizes, to be planned: `shardviz plan plans/llama_405b`."""
