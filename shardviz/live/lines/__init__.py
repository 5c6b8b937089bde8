"""Run a step once more and keep every call inside of one module, with the line of the user's code that makes it.

`recorder` keeps the calls and their tensors, `frames` finds the lines, `rerun` runs the step when the judge asks for
it. Ranks judge nothing here.
"""
