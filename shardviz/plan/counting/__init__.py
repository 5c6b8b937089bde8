"""What a plan counts over all ranks at once: bytes by role, uneven and whole tensors, what a step sends. No torch."""
