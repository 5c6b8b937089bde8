"""A step of a planned model, on tensors without values. Needs torch.

`dry_step` runs it. `memory` sees all operators, follows storages, and asks `choices` what a router chooses. `answers`
is for code that reads values.
"""
