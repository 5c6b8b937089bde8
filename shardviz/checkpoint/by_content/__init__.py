"""Maps between two checkpoints with different names, inferred from their contents.

`families` has the tensors that differ by a number in their names, and the lines of a map; `solving` makes one tensor of
those of the other side, by a few values of each slice; `inferring` says so for all of them.
"""
