"""The first wrong module of a step: calls, forward and backward, against the unsharded ones.

`traces` reads what ranks wrote of a step, and `judging` says what each rank has of an unsharded step at every place: of
a probe's step as ranks ask for it (`step_judge`), of two jobs' in `jobs`.

`calls` reads that judgement of every call, `divergence` finds the first that goes wrong, `causes` says why from the
values there, and `naming` puts that into the findings and folds what follows from it.
"""
