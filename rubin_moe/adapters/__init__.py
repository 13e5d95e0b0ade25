"""Serving frameworks that this package plugs into; nobody imports these."""
