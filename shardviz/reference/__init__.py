"""Values as ids: what a rank holds is compared with a reference, and where it differs the reference says whose it is.

A real job's weights must not be overwritten, and a few neighbouring values are nearly unique even in bfloat16. `files`
reads slices of a checkpoint, `lookup` finds where content belongs. Needs numpy only.
"""
