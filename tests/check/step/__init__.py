"""Tests of the checks of a step."""
