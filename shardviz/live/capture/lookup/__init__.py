"""Ids of weights that nobody stamped: looked up by value in a reference, a loader's stamped copy, or the weights."""
