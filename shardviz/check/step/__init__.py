"""One step's gradients, outputs and logged values, compared with the unsharded model's.

`comparison` lays one tensor beside its reference, `evidence` has all of them, and `relate.measures` says what the two
sides have to do with each other. `rules` name the cause of that, and `run` goes through them and leaves out what
follows from another finding.
"""
