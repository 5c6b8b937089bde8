"""The drawing model that every format shares: the ranks of each block, where blocks meet, colors and labels."""
