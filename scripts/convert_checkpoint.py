"""Convert a checkpoint without installing the package: ``rubin-moe convert`` by another name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rubin_moe.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "convert")
    main()
