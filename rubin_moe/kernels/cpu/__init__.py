"""The CPU backend: correct first, then fast."""
