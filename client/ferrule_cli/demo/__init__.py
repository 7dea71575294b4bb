"""``ferrule demo``: a story told by a server of its own."""
