"""What a finding is seen by: the few numbers, names or positions that disagree, as one small table for every format.

`of_finding` chooses; `copies`, `steps`, `orders` and `names` each know a family of kinds; `exhibit` is what they make.
"""
