"""Speaks OpenAI: HTTP and JSON in, prompts as token ids out to a `Backend`, tokens back in, text and events out.

    app            which path is served by what; known paths bypass Starlette's layers
    endpoint       around every handler: method, API key, errors, metrics, log
    http           one request: body, answer or stream, and whether its client is still there
    openai_types   what clients may send (responses_types: to /v1/responses); openai_output: what they receive
    reading        bodies to these types, or the 400 that names the field
    chat, completions, responses, tokenize, pages      the handlers
    conversation   a chat made ready, for chat and responses: prompts, params, tools -> Work
    generation     Work to text: submits, detokenises, finds stop strings, aborts
    stream         the bytes of events
    tools, tool_parser, reasoning, deltas              what answers hold beside text
    fake_backend   a `Backend` without workers

What was decided, where OpenAI leaves it open:

- The status of a stream is sent with its first token, so what fails before it has its proper status. What fails later is an
  event `data: {"error": {...}}` that ends the stream without `[DONE]`; the official SDK raises APIError on it.
- One event per token: the first one carries the role, the last one the finish reason. Text that may be the beginning of a
  stop string or of a character is held back, so an event's text may be empty.
- With API keys set, everything needs one but /health and /metrics.
- `x-request-id` is the client's `request_id` or `rid`, else the header it sent, else the id of the answer.
- The role `developer` is rendered as `system`. Text parts of a message are joined by newlines.
- A template that knows nothing of tools gets the Hermes system message instead; see `tools`.
"""
