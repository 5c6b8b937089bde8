"""Silent sharding bugs, each with its right twin, tried against the tool: all found, rightly named, no false alarm."""
