"""Where the user is and where to go: what is selected, at what scale, and which ranks it marks."""
