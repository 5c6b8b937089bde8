"""Every family of transformers that has a tensor-parallel plan, built tiny, through save -> load on ranks -> save.

`python -m tests.frameworks.families` prints what becomes of each; `test_families.py` compares that with `known`.
"""
