"""Two real jobs' traces of a step side by side: of one process and of many.

`values` are kept elements of a tensor, `traces` what ranks wrote, `starts` whether both jobs begin with the same
weights and rows, `judging` what each rank has of the other job's values at every place, `random` whether they drew the
same numbers, `assembled` the two as one dump, to which the rules for a probe's step apply, `findings` what these find
and `compare` what is said.
"""
