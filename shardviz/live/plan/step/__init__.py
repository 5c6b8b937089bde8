"""A step of a planned model, on tensors without values. Needs torch.

`planned` runs it. `memory` sees all operators, follows storages, and asks `attention` what a GPU would not make and
`choices` what a router chooses. `answers` is for code that reads values.
"""
