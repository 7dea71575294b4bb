"""``python -m ferrule_cli`` is the command ``ferrule``."""

import sys

from ferrule_cli import main

if __name__ == "__main__":
    sys.exit(main())
