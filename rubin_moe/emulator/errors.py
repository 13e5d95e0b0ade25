"""What the emulator raises on its own account."""


class EmulatorError(RuntimeError):
    """Something the emulator was asked for and does not do, or cannot do here."""
