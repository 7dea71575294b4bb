"""A server whose tombstones last seconds instead of ten minutes, so that a run of minutes shows whether memory grows.

Tombstones and the ends of creations are kept for ten minutes by promise and fill up just as long, which would hide
a leak of their size. Whoever runs this in place of ``ferrule_server`` sees memory level off at once, or a leak.
"""

from __future__ import annotations

import sys

from ferrule_server.__main__ import main
from ferrule_server.engine.appends import creations
from ferrule_server.kv import registry

TOMBSTONE_S = 20.0

if __name__ == "__main__":
    for module in (registry, creations):  # a constant of the product, set before anything runs
        vars(module)["TOMBSTONE_S"] = TOMBSTONE_S
    sys.exit(main())
