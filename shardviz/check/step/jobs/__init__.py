"""Two real jobs' traces of a step side by side: of one process and of many.

`starts` says whether both jobs begin with the same weights and rows, `whole_job` puts what the ranks of one job have
together, in the way that makes it the other job's, `assembly` makes the two one dump, to which the
rules for a probe's step apply, which then find what is wrong, and `compare` has what is said.
"""
