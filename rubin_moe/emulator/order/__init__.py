"""The order of memory accesses: happens-before by vector clocks, over warps and asynchronous work.

A launch with rules keeps for every warp what it knows to have happened (a clock for every
component) and for every 32-bit word who wrote it last and who has read it since. An access that
conflicts with one that its warp does not know of is a race, whatever the values turn out to be.
"""
