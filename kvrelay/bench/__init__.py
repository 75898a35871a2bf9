"""Measurements: `kvrelay bench SCENARIO`. Every figure is compared with something measured in the same run.

- `main.py`      the command line; `report.py` the result file and the table
- `machine.py`   what this machine can do at best: memory bandwidth, GEMM rate
- `work.py`      what a model asks for: bytes and FLOPs of a step, hence its roofline
- `engine.py`    rounds and figures; `own_engine.py` runs them on our engine, `peer.py` on transformers
- `router.py`    the real router on a core of its own, between `fake_worker.py` and `load.py` on another (`processes.py`),
                 with `bare_sse.py` as the reference
"""
