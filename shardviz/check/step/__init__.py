"""After one step: gradients, outputs and logged values beside those of the same step of the unsharded model.

`compared` lays one tensor beside its reference, `gradients`, `scalars` and `scale` each hold one rule, `run` goes
through them.
"""

from shardviz.check.step.run import check_step

__all__ = ["check_step"]
