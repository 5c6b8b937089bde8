"""Which tensor of one checkpoint is which of another whose names are others, by what is in them: the lines of a map.

`numbered` has the tensors that differ by a number in their names, and the lines of a map; `solving` makes one tensor of
those of the other side, by a few values of each slice; `inferring` says so for all of them.
"""
