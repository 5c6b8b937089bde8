"""Where elements are: one tensor at a time, what its ranks hold beside what they claim and what the author intends."""
