"""The parts of the screens: each shows the data that it is given and posts the user's choices."""
