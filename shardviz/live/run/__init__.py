"""A real job, unedited: `shardviz run` starts it, and hooks in its ranks capture models.

`bootstrap/` is what Python itself imports in every process of the job, `hooks/` wraps torch's functions when their
modules are imported, `session` is what a process knows of its job, `observer` which models are due to be captured,
`meeting` lets ranks agree to capture and to end, `taking` captures; `references/` says what values are compared with,
`tracing` follows a step. `options` is what crosses between the command and the ranks; it imports no torch.
"""
