"""Values that travel: through a checkpoint and back, or from a trainer to an engine.

What is sent is filled with values that say where they belong, and what receives it with others. `contents` says what
a job has and fills it, `pieces` how a target is made of a source, `judging` compares and says what is wrong,
`state_rules` what else a load must bring, and looks at what was saved; `roundtrip` and `transfer` assert.
"""
