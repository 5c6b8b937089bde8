"""The first wrong line of a module: ranks' calls, related to the unsharded module's.

`naming` says which module ranks should look into, and puts the first wrong line into the finding; `calls` pairs the
calls of both sides, `states` relates their values, and `faults` finds the line. `types` says what the tensors of a line
are along each axis.
"""
