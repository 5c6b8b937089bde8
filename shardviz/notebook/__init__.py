"""A run in Python: `shardviz.load(path)` gives tensors as numpy arrays, report and findings.

Nothing is read or judged here: `dump`, `check` and `checkpoint` do that, and `picture` draws. `dumps` has a
dump's run, `saved` a checkpoint's, `verdicts` a report and its findings, `runs` has what
both share and puts shards together.
"""
