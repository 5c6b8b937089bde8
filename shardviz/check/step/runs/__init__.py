"""Two runs of a step side by side: the first module that differs between them, of any meshes, sizes and dtypes.

`compare` lays the runs' unsharded models side by side, by the few numbers that each wrote of its weights and of what
goes in and out of its modules, and then the first wrong module of each run; `departure` has what it returns.
"""
