"""The first wrong module of a step: its calls in order, forward and backward, each beside the unsharded model's.

`calls` reads what ranks wrote of every call, `forward` and `backward` find the first that goes wrong, `causes` says why
from the values there, and `naming` puts that into the findings and folds what follows from it.
"""
