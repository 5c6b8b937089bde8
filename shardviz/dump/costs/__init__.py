"""The cost of a run, from its dump: bytes per rank, collectives, a pipeline's schedule."""
