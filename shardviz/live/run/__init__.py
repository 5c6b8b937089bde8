"""A real job, unedited: `shardviz run` starts it, and hooks in its ranks capture each model once.

`bootstrap/` is what Python itself imports in every process of the job, `hooks/` wraps torch's functions when their
modules are imported, `observer` knows what was sharded and when to capture it, `meeting` lets ranks agree, `taking`
captures; `known/` says what values are compared with, `stamped/` is what `--stamp` changes, `ending` ends a job.
`options` and `notes` cross between the command and the ranks; they import no torch.
"""
