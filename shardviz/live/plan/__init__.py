"""Plan a job from a few ranks, each alone in a world that does not exist. Needs torch.

`planning` plans a `job`; `choosing` says which ranks are asked, `forks` asks them, and in each `rank` builds the model,
shards it and runs its `step/`.
"""
