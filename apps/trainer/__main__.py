"""`uv run apps/trainer`: the same program as `olmo-trainer`."""

import sys

from olmo_trainer.cli import main

if __name__ == "__main__":
    sys.exit(main())
