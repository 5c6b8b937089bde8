"""From a dump to findings: every disagreement between what is claimed, held and intended.

One module per family of errors. All return `finding.Finding`, `run` calls them, and `report` drops the findings that
follow from others. `order/` looks at where elements are, `values/` at the model's own numbers, `step/` compares a
training step with the unsharded model's, `ranks` looks at the run's ranks.
"""
