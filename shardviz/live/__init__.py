"""The half of shardviz that needs torch: launch ranks, stamp weights, capture tensors."""
