"""`python -m kvrelay`."""

from __future__ import annotations

import sys

from kvrelay.cli import main

sys.exit(main())
