"""Without a server, with a prefill and a decode worker: the KV cache moves between processes. Usage: offline_relay.py [MODEL]"""

import sys

from kvrelay import LLM, SamplingParams

if __name__ == "__main__":
    story = "A relay race is run by a team. Each runner carries the baton for a while and hands it to the next one. " * 8
    prompts = [story + question for question in ("How many runners hold it at once?", "What do they carry?", "Who wins?")]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", prefill=1, decode=1) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True):
            print(f"...{prompt[-40:]!r} -> {output.outputs[0].text!r}")
        for worker in llm.relay.describe()["workers"] if llm.relay else []:
            print(
                f"{worker['role']}: {worker['transfers']['done']} hand-overs, {worker['transfers']['bytes'] / 1e6:.1f} MB moved"
            )
