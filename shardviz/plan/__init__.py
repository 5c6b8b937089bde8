"""A plan: what every rank of a job that nobody has started will hold, from a few ranks' layouts. No torch here.

A plan's dump has one file, `plan.json`, instead of one per rank. `records` says what stands in it, `read` reads it, and
`ranks` and `tensors` make the records and shards of any rank when they are asked for, so that every verb opens it.
"""
