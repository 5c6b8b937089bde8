"""Which tensor of one checkpoint is which of another whose names are others, by what is in them: the lines of a map.

`strips` are a few values of each slice of a tensor, `families` are the tensors that differ by a number in their names,
`solving` makes one tensor of those of the other side, `inferring` says so for all of them.
"""
