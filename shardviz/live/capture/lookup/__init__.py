"""Ids of unstamped weights, found by value in a reference, a stamped copy or the weights."""
