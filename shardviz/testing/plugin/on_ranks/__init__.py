"""A test on its way to ranks and on them: what is packed, and what each rank makes of it."""
