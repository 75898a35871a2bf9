"""A context index in front of the server: reorder documents, ask, and see that the index forgets what the cache forgets.

Start both first (docs/contextpilot.md):
    kvrelay serve --context-index http://127.0.0.1:8765 --kv-blocks 200
    python -m contextpilot.server.http_server --host 127.0.0.1 --port 8765 --infer-api-url http://127.0.0.1:8000

Usage: contextpilot.py [URL of ContextPilot]
"""

import sys

import httpx

DOCUMENTS = [
    "A relay race is run by teams of four.",
    "The baton must change hands inside the zone.",
    "The last runner is called the anchor.",
    "A dropped baton may be picked up by the runner who dropped it.",
]
QUESTIONS = [
    ([0, 1, 2], "How many run in a team?"),
    ([2, 0, 3], "Who picks up a dropped baton?"),
    ([1, 2, 0], "Who runs last?"),
]

index = httpx.Client(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8765", timeout=120.0)

plan = index.post("/reorder", json={"contexts": [documents for documents, _ in QUESTIONS]}).raise_for_status().json()
# The first call gives contexts in the order in which they are best served, later calls in the order they were given.
initial = plan["mode"] == "initial"
for place, documents in enumerate(plan["reordered_contexts"]):
    question = plan["original_indices"][place] if initial else place
    text = "\n".join(DOCUMENTS[document] for document in documents)
    answer = index.post(
        "/v1/completions",
        json={
            "model": "smollm2",
            "prompt": f"{text}\nQuestion: {QUESTIONS[question][1]}\nAnswer:",
            "max_tokens": 12,
            "temperature": 0,
            "stop": "\n",
            "request_id": plan["request_ids"][question],  # so that kvrelay can say when its KV is gone
        },
    )
    served = answer.raise_for_status().json()
    usage = served["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"documents {documents}: {served['choices'][0]['text'].strip()!r}, {cached} of {usage['prompt_tokens']} cached")

print("the index lists", index.get("/requests").json()["num_requests"], "requests")
