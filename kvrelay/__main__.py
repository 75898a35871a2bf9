"""`python -m kvrelay`."""

from __future__ import annotations

import sys

from kvrelay.cli.main import main

sys.exit(main())
