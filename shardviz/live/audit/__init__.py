"""The audit: torch's own sharding and gathering against the oracle, over small uneven sizes.

`cases` says what is tried, `sweep` does all of it and survives what kills a rank, `repro` writes a case as a few lines
of plain torch. `cases` and `repro` need no torch.
"""
