"""When a world does not end well: which rank failed or waits, where, and what it printed."""
