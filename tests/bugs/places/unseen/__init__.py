"""Faults and right twins that the rules were not written for."""
