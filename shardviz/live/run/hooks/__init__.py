"""How calls of a job are seen: `table` says which functions are wrapped, `wrapping` how.

`arming` sees calls of modules; `observing` calls the observer, never twice and without harm.
"""
