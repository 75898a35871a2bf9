"""`kvrelay bench gpu`: the built-in engine on one NVIDIA card. Correct first (`parity.py`), then fast (`speed.py`)."""
