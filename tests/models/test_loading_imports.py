"""What a worker loads beside torch when it loads a model."""

from __future__ import annotations

import subprocess
import sys

from patience import PATIENCE_S
from tiny_models import tiny_model

SCRIPT = """
import sys
from kvrelay import LLM, SamplingParams
llm = LLM(sys.argv[1], kv_blocks=16, max_model_len=64)
llm.generate(["The quick"], SamplingParams(temperature=0, max_tokens=2))
print(sorted({"torch._dynamo", "triton", "transformers"} & set(sys.modules)))
"""


def test_a_model_on_a_cpu_loads_neither_torchs_compiler_nor_triton() -> None:
    """They take seconds, and Triton's binding complains when the process ends."""
    command = [sys.executable, "-c", SCRIPT, str(tiny_model("llama"))]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "[]"
    assert "nanobind" not in ended.stderr
