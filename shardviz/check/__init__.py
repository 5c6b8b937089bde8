"""From a dump to findings: every disagreement between what is claimed, held and intended.

One module a family of errors; `finding` is what they all return, `run` calls them all.
"""
