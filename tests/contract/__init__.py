"""The contract: what shardviz says of every recorded case, without a sentence in it.

A case is a command (`check DUMP`, `diff A B`) and the files it reads, recorded from the tests that made them: silent
bugs and their right twins, probes, made dumps, checkpoints, jobs. `python -m tests.contract compare` judges all of them
again and prints what differs from `verdicts/`; `write` runs the tests and records anew.
"""
