"""Values that a model is compared with: its own before sharding, and those the job loads.

`values` keeps the first, `sources` and `files` find the second, `choosing` says which is used, `writing` writes.
"""
