"""The dump: the files a run writes, which alone cross from the live to the offline half.

A folder `NAME.shardviz/` with `run.json` and one `rank_00003.json` per rank (and `rank_00003.safetensors` for large
dense values). `records` defines what the files contain, `write` and `read` do that, and `dump` lays the
ranks' records of one tensor side by side.
"""
