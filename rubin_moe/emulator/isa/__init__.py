"""Instruction families: emitters of native code, and units that act on NumPy state."""
