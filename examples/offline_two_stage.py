"""Think, then search from the thought: stage 2 computes only its suffix. Usage: offline_two_stage.py [MODEL]"""

import sys

from kvrelay import LLM, BeamSearch, SamplingParams

with LLM(sys.argv[1] if len(sys.argv) > 1 else "smollm2", max_model_len=512) as llm:
    watched = "Films that a user liked: Alien, Blade Runner, Solaris, Stalker, 2001. " * 4
    think = SamplingParams(temperature=0, max_tokens=48)
    thought = llm.generate(watched + "What these have in common:", think, keep_kv=True)[0]
    print(f"stage 1: {thought.outputs[0].text!r}")

    beam = BeamSearch(width=8)
    search = SamplingParams(temperature=0, n=3, max_tokens=6, beam=beam)
    result = llm.generate_continuation(thought, "\nThe next film to see:", search)
    assert result.continued is not None
    print(f"stage 2 computed {result.continued.computed_tokens} of {len(result.prompt_token_ids)} tokens")
    for output in result.outputs:
        print(f"  {output.score:.3f} {output.text!r}")
    llm.release(thought)
