"""A live job's dump beside a checkpoint: what each rank holds, followed by its hash, or by its values."""
