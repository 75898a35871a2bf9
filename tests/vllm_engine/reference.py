"""What one vLLM engine gives for prompts of token ids: `python reference.py FOLDER` reads them as JSON, writes outputs.

A process of its own: vLLM holds memory and threads until its process ends.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from vllm import LLM, SamplingParams

    asked: dict[str, Any] = json.load(sys.stdin)
    llm = LLM(
        model=sys.argv[1], skip_tokenizer_init=True, dtype="float32", enforce_eager=True, block_size=32, max_model_len=1024,
        max_num_seqs=8,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=asked["max_tokens"], detokenize=False, stop_token_ids=asked["eos"])
    answers = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], params)
    print("\nTOKENS " + json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
