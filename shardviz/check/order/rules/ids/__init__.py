"""Rules about the ids of one tensor: foreign, missing, held too often, not where they belong."""
