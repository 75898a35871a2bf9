"""Without a server: the model runs in this process. Usage: offline.py [MODEL]"""

import sys

from kvrelay import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    prompts = ["The capital of France is", "Water boils at", "A relay race is"]
    for prompt, output in zip(prompts, llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20)), strict=True):
        print(f"{prompt!r} -> {output.outputs[0].text!r}")
    llm.close()
