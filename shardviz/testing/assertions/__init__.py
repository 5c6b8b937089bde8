"""The assertions: what they compare, and the text of a failed one."""
