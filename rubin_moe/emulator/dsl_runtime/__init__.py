"""The pieces under `emulator.dsl`: the stand-in runtime, and what is changed in CuTe DSL."""
