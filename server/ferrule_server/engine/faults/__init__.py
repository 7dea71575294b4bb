"""What fails: unexpected exceptions (``unexpected.py``), and places where tests fail on purpose (``failpoints.py``)."""
