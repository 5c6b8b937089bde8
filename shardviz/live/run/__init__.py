"""A real job, unedited: `shardviz run` starts it, and hooks in its ranks capture each model once.

`bootstrap/` is what Python itself imports in every process of the job, `importing` wraps torch's functions when their
modules are imported, `hooks` says which. `observer` knows what was sharded and when to capture it, `arming` sees the
first call, `meeting` lets ranks agree, `taking` captures; `values` and `sources` say what values are compared with.
`options` and `notes` cross between the command and the ranks; they import no torch.
"""
