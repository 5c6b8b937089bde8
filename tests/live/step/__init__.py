"""Tests of the step of a probe."""
