"""Plans: what every rank of an unstarted job will hold, from a few ranks' layouts. No torch.

Its file and the records and shards of its ranks are in `shardviz.dump`: every verb opens a plan as it opens any dump.
"""
