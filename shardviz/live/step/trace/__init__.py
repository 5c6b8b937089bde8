"""Follow a step through its modules, forward and backward, and record what each is given and returns.

`recorder` keeps what goes in and out of every module, `points` writes it, `noise` says how far rounding alone takes a
step, and `replay` runs modules again on what they were given. Nothing is judged here: `step/judge` asks.
"""
