"""Which functions are never entered by the contract, the demos and the probes, in whatever process they run."""
