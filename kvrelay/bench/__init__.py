"""Measurements: `kvrelay bench SCENARIO`. Every figure is compared with something measured in the same run.

- `main.py`     the command line, and the table of scenarios
- `harness/`    what scenarios share: options and parts (`scenario.py`), child processes (`child.py`), workers behind a router
                of this process (`cluster.py`) or behind `kvrelay serve` (`server.py`), an engine without one (`engine.py`),
                prompts (`workload.py`), the drawing (`plot.py`), the result (`report.py`)
- `compare.py`  two result files side by side
- the others    a scenario each: `machine.py`, `everything.py`, or a folder whose `scenario.py` has its options and parts
"""
