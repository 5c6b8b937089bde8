"""How calls of a job are seen: `importing` wraps functions when their modules are imported, `table` says which,
`wrapping` how; `arming` sees calls of modules; `observing` calls the observer, never twice and without harm.
"""
