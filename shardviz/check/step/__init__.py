"""After one step: gradients, outputs and logged values beside those of the same step of the unsharded model.

`compared` lays one tensor beside its reference, `evidence` has all of them, and `relate.measures` says what the two
sides have to do with each other. `rules` name the cause of that, and `run` goes through them and leaves out what
follows from another finding.
"""
