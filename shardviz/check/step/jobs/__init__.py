"""Two real jobs' traces of a step side by side: of one process and of many.

`starts` says whether both jobs begin with the same weights and `rows` whether with the same rows (`rows_of_steps`:
those of other steps), `whole_job` puts what the ranks of one job have together, in the way that makes it the other
job's, `assembly` makes the two one dump, to which the rules for a probe's step apply, and `compare` has what is said.
What only two jobs can show is in `gradients`, `optimizers`, `updates`, `buffers` and `other_steps`.
"""
