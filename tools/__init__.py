"""Programs for the people who work on Ferrule; nothing here is packaged or imported by the server."""
