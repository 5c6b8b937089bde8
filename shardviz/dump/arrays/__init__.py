"""A tensor's numbers as arrays: mapped from files, made from runs of ids, sampled, sketched."""
