"""The parts of the screens: each shows what it is given and posts what was chosen."""
