"""Two runs of a step side by side: the first module that differs between them, of any meshes, sizes and dtypes.

`unsharded` lays the runs' unsharded models side by side, by the few numbers that each wrote of its weights and of what
goes in and out of its modules; `sharded` the first wrong module of each run beside its own unsharded model; `compare`
puts both together.
"""
