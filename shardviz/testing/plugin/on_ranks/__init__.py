"""A test on its way to ranks and on them: how it is packed, and how each rank runs it."""
