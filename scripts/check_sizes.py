"""Fails when a file has outgrown its kind: 600 lines, tests 400, adapters 250, README 150."""

import subprocess
import sys
from pathlib import Path

LIMITS = (("README.md", 150), ("tests/", 400), ("rubin_moe/adapters/", 250), ("", 600))


def limit_of(name: str) -> int:
    """Lines that the first matching prefix of `LIMITS` allows."""
    return next(limit for prefix, limit in LIMITS if name.startswith(prefix))


def main() -> int:
    tracked = subprocess.run(
        ["git", "ls-files", "*.py", "*.sh", "*.c", "README.md"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    over = []
    for name in tracked:
        path = Path(name)
        if path.exists() and (lines := len(path.read_text().splitlines())) > limit_of(name):
            over.append(f"{name}: {lines} lines, at most {limit_of(name)}")
    print("\n".join(over) or f"sizes: {len(tracked)} files within their limits")
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
