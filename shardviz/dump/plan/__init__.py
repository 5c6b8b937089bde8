"""A plan's dump, `plan.json`: it has a few ranks' records; other ranks' are made on demand."""
