"""The host ring: one engine thread that turns jobs into steps. Numpy only."""
