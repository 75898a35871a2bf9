"""A context index in front of the server: reorder documents, then ask (docs/contextpilot.md says how to start both).
Usage: contextpilot.py [URL of ContextPilot]"""

import sys

import httpx

DOCUMENTS = [
    "A relay race is run by teams of four.",
    "The baton must change hands inside the zone.",
    "The last runner is called the anchor.",
    "A dropped baton may be picked up by the runner who dropped it.",
]
QUESTIONS = [([0, 1, 2], "How many run in a team?"), ([2, 0, 3], "Who may pick it up?"), ([3, 1, 2], "Who runs last?")]

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8765"
index = httpx.Client(base_url=url, timeout=120.0)
try:
    plan = index.post("/reorder", json={"contexts": [documents for documents, _ in QUESTIONS]}).raise_for_status().json()
except httpx.TransportError as error:
    sys.exit(f"no ContextPilot server answers at {url}: {error} (docs/contextpilot.md says how to start one)")

for place, documents in enumerate(plan["reordered_contexts"]):
    # The first call gives contexts in the order in which they are best served, later calls in the order they were given.
    number = plan["original_indices"][place] if plan["mode"] == "initial" else place
    text = "\n".join(DOCUMENTS[document] for document in documents)
    body = {
        "model": "smollm2",
        "prompt": f"{text}\nQuestion: {QUESTIONS[number][1]}\nAnswer:",
        "max_tokens": 12,
        "temperature": 0,
        "stop": "\n",
        "request_id": plan["request_ids"][number],  # so that kvrelay can say when its KV is gone
    }
    served = index.post("/v1/completions", json=body).raise_for_status().json()
    cached = (usage := served["usage"])["prompt_tokens_details"]["cached_tokens"]
    print(f"documents {documents}: {served['choices'][0]['text'].strip()!r}, {cached} of {usage['prompt_tokens']} cached")

print("the index lists", index.get("/requests").json()["num_requests"], "requests")
