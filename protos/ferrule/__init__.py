"""Root of the generated packages: `ferrule.v1` is the wire contract."""
