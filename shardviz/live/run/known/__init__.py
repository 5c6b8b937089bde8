"""What a model's values are compared with: those from before it was sharded, and what the job loads.

`values` keeps the first, `sources` and `files` find the second, `choosing` says which is used, `writing` writes.
"""
