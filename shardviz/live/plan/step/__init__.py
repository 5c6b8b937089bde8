"""A step of a planned model, on tensors without values. Needs torch.

`planned` runs it. `watched` sees all operators: for `memory`, which follows storages, and for `choices`, a router's; by
`attention` and `exchanges` they know what a GPU or a neighbour would give. `answers` is for code that reads values.
"""
