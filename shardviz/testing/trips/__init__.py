"""Values that travel: through a checkpoint and back, or from a trainer to an engine.

What is sent is filled with values that say where they belong, and what receives it with others. `contents` says what
a job has, `filling` writes, `judging` compares, `cutting` looks at parts of fused tensors, `mapping` leaves out what
a map says is padding, `disk` looks at what was saved; `roundtrip` and `transfer` assert.
"""
