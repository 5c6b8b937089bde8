"""Numbers of a tensor as arrays: mapped from a file, laid out from runs of ids, sampled, sketched."""
