"""Plan a job from a few ranks, each alone in a world that does not exist. Needs torch.

`planning` plans a job; `choosing` says which ranks are asked, `forks` asks them; each `rank` builds and shards the
model, and `dry_step` runs its step: `memory` sees all operators, and `choices` says what a router chooses.
"""
