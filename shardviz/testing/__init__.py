"""Helpers for users' own tests: assertions, the multi-rank decorator, the pytest plugin."""
