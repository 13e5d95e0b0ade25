"""Number formats and the canonical weight container. A leaf: imports nothing of the package
but `errors`. `spec` is standard library only; the rest needs torch."""
