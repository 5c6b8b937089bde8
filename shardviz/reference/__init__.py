"""Values as ids: a rank's values are looked up in a checkpoint to see where they belong.

A real job's weights must not be overwritten, and a few neighboring values are nearly unique even in bfloat16. `files`
reads slices of a checkpoint, `lookup` finds values in it by windows of neighbors, or one by one. Needs numpy only;
`live/capture/lookup/` calls them.
"""
