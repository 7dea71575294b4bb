"""``python -m ferrule_server.durability``: the command ``ferrule durable``."""

from __future__ import annotations

import sys

from ferrule_server.durability.inspect import main

if __name__ == "__main__":
    sys.exit(main())
