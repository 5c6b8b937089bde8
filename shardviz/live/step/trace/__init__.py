"""Follow a step through its modules, forward and backward, and find what each has of the unsharded model's values.

`recorded` keeps what goes in and out of every module, `joined` puts micro-batches together, `fitting` finds which part
of the unsharded model's values a rank has, and `judged` does that for the whole step and writes down what it found.
"""
