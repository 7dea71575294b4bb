"""``ferrule top``: a view of a server while it works."""
