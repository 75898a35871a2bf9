"""The transports, behind one contract (`base.py`)."""
