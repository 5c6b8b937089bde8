"""Order of elements: what ranks hold of each tensor, what they claim, and what is intended."""
