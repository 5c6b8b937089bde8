"""Correct probes that look like bugs: shardviz must report nothing here."""
