"""A step as the step's screen shows it: its collectives, its modules, its texts."""
