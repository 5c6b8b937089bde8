"""How calls of a job are seen: `table` says which functions are wrapped, `observing` wraps them and calls the observer.

`arming` sees calls of modules.
"""
