"""What concerns a run as a whole: what is missing from its dump, and ranks whose groups contradict the mesh."""
