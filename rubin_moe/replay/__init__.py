"""First-silicon kit: a launch with the memory that the emulator leaves, run again on a GPU.

`record` saves launches (needs the emulator), `file` is what lies on disk, `gpu` runs it and says
what differs (needs a driver and NumPy, neither torch nor a toolkit).
"""
