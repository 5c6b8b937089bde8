"""A step of a planned model, on tensors without values. Needs torch.

`planned` runs it, and `watched` is the one mode that sees operators: `memory` follows storages through it, `choices`
and `answers` say what code gets that asks for values, `attention` and `exchanges` what a GPU or a neighbour would give.
"""
