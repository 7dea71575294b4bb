"""The device ring: everything that runs a step."""
