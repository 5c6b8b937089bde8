"""What a finding is seen by: the few numbers, names or positions that disagree, as one small table for every format.

`of_finding` chooses; `copies`, `steps`, `orders`, `names` and `gathered` each know kinds of findings; `exhibit` is what
they make, and how its columns are written.
"""
