"""A plan: what every rank of a job that nobody has started will hold, from a few ranks' layouts. No torch here.

Its file and the records and shards of its ranks are in `shardviz.dump`: every verb opens a plan as it opens any dump.
"""
