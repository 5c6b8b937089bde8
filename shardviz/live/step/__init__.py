"""One training step, sharded and unsharded, observed so that the two can be compared."""
