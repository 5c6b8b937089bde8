"""A plan's dump: one file, `plan.json`, has what a few ranks have; `ranks` and `shards` make any rank's when asked."""
