"""After one step: gradients, outputs and logged values beside those of the same step of the unsharded model.

`compared` lays one tensor beside its reference, `evidence` has all of them. `gradients`, `tied`, `order`, `losses`,
`norms`, `scale` and `terms` each hold rules, `advice` says where to look for what none explains, and `run` goes through
them; `consequences` leaves out what follows from another finding.
"""
