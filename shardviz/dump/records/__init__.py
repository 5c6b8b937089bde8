"""The records in a dump's files as types; reading validates against them and their bounds.

`files` has what stands in `run.json` and in a rank's file, made of the records of the other modules. Numbers are JSON
numbers, and unknown fields are refused.
"""
