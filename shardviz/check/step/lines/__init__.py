"""The first wrong line of a module: ranks' calls, related to the unsharded module's.

`naming` says inside of which module ranks should look; `calls` pairs the calls of both sides, `states` relates their
values, `faults` finds the first wrong line, and `naming` puts it into the finding. `types` says what the tensors of a
line are along each axis.
"""
