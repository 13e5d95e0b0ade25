"""Hardware rules as data and pure functions. A leaf: standard library only."""
