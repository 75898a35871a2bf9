"""The model in a prefill and a decode process, which hand the KV cache over. Usage: offline_relay.py [MODEL]"""

import sys

from kvrelay import LLM, SamplingParams

if __name__ == "__main__":
    story = "A relay race is run by a team. Each runner carries the baton for a while and hands it to the next one. " * 8
    prompts = [story + start for start in ("The first runner", "The last runner", "The baton")]
    with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", prefill=1, decode=1) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=24)), strict=True):
            print(f"{prompt[len(story) :]!r} -> {output.outputs[0].text!r}")
        assert llm.relay is not None
        for worker in llm.relay.describe()["workers"]:
            print(f"{worker['role']} worker, process {worker['pid']}: {worker['steps']} steps")
