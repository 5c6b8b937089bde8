"""The tensors of one rank: their lines, the numbers in memory, and who has an element."""
