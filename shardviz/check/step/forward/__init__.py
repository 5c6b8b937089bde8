"""Why an output is wrong though every weight is right: which parts ranks hold, in which order, and where it begins.

Each rule takes what the step shows and the wrong output, and returns a `Reason` if the numbers bear it out.
"""
