"""Plan a job on a few of its ranks: each is asked alone, in a world that does not exist. Needs torch.

`asking` asks ranks in `forks`, `choosing` says which, `asked` builds and shards the model there, `step/` runs its step.
"""
