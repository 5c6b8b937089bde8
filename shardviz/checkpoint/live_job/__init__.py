"""A live job's dump compared with a checkpoint: ranks' shards by hash, or by values."""
