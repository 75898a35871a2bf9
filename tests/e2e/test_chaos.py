"""The chaos test: workers die, hang, drain and join at random under 32 streams, and no client notices (see `tests/chaos.py`).

KVRELAY_CHAOS_S says for how many seconds, KVRELAY_CHAOS_SEED which chaos. `make soak` is the long form.
"""

from __future__ import annotations

import os
import pathlib

import pytest
from chaos import run_chaos

DURATION_S = float(os.environ.get("KVRELAY_CHAOS_S", "8"))
SEED = int(os.environ.get("KVRELAY_CHAOS_SEED", "1"))


@pytest.mark.timeout(DURATION_S + 1800)
def test_no_client_notices_that_workers_come_and_go(tmp_path: pathlib.Path) -> None:
    report = run_chaos(tmp_path, seed=SEED, duration_s=DURATION_S)
    print(report.as_text())
    assert not report.problems, f"{report.as_text()}\nlogs are in {tmp_path}"
    hurt = report.events.get("kill", 0) + report.events.get("hang", 0) + report.events.get("terminate", 0)
    assert hurt >= 1, f"nothing happened: {report.as_text()}"
