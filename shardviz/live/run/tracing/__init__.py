"""One step of a running job, followed through its modules: what `shardviz run --trace` keeps of it on every rank.

`following` waits for the step and ends it, `recording` has the hooks, which only read, `writing` writes what they saw.
Ranks do not talk to each other here: each writes its own file, and `shardviz diff` lays two jobs side by side.
"""
