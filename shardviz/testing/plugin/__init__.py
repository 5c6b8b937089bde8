"""The pytest plugin: collects tests that run on ranks, sends them there, reports results."""
