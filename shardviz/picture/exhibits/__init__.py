"""Exhibits: a small table of the numbers, names or positions that show a finding.

`of_finding` chooses one; `copies`, `steps` and `orders` each cover some kinds of findings;
`exhibit` has the table itself and how its columns are written.
"""
