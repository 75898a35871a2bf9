"""vLLM's engine in a worker, behind the same `ServingEngine` as kvrelay's own (docs/vllm.md).

    stage      builds it all: options -> vLLM's core, its KV memory -> relay -> engine
    engine     implements ServingEngine: samples of requests become sequences of the core, and its outputs ours
    sending    a prefill worker's hand-overs, and `receiving` a decode worker's: what the connector asks and tells
    seam       what the engine needs of a core, and what a core tells: nothing of vLLM, so that tests have a core of their own
    core       vLLM's EngineCore as such a core       } the files that import vLLM
    connector  vLLM's door to the relay               }

vLLM's core runs in this process and thread, so that a step of the worker is a step of the core. Its blocks are what the relay
calls tokens: a hand-over moves whole blocks, whatever lies in them.
"""
