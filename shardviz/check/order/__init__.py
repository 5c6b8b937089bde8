"""Where elements are: one tensor at a time, what its ranks hold, what they claim, and what the author intends."""
