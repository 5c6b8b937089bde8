"""After the optimizer's step: weights, its state and buffers."""
