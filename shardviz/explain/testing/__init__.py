"""Causes that the assertions of users' tests find."""
