"""Why an output is wrong if every weight is right: parts, their order, where it begins.

Each rule takes what the step shows and the wrong output, and returns a `Reason` if the numbers bear it out.
"""
