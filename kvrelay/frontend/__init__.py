"""Speaks OpenAI: HTTP and JSON in, prompts as token ids out to a `Backend`; tokens back in, bodies and events out.

    http/      the shell: one request as handlers see it, API keys, limits on connections, errors
    feed/      what the dashboard is told, live
    service    what every handler works with: tokenizer, backend, options, feed
    prompt/    from a body to token ids
    answer/    from tokens to a body: one loop, four shapes
    pages/     endpoints that generate nothing; pages/site/ are the files of the pages for browsers
    app        which path is served by what
    fake_backend   a `Backend` without workers

Imports point one way:
http, feed <- prompt/types, prompt/images, prompt/call_formats <- service <- prompt <- answer, pages <- app.

The way of a chat request, from bytes to `GenerateRequest` and from `RequestStream` back to bytes:

    bytes of the client
      |  http/connections.LimitedProtocol     HTTP; too many connections, slow clients
      |  http/auth.ApiKeys                    the API key
      |  app.FrontEnd                         path -> endpoint
      |  http/endpoint.Endpoint               method -> handler; errors, metrics, log of all that follows
      |  answer/chat.chat_completions         the handler
      |  http/call.Call.read                  body -> ChatRequest, or the 400 that names the field
      |  prompt/conversation.prepare_conversation
      |    | prompt/params.shape_of             the grammar that the request asks for
      |    | prompt/tools.plan_tools            the grammar of tool calls
      |    | prompt/continuation.origin_of      the tokens of the request that it continues from, if it does
      |    | prompt/template.render             messages -> text, by the chat template
      |    | service.Service.encode_chat        text -> token ids
      |    | prompt/images.Images.place         placeholders for images
      |    | prompt/params.sampling_params      SamplingParams
      |  prompt/work.Work                     all of it, ready
      |  answer/loop.answer
      |  answer/generation.Generation         one GenerateRequest per prompt
      v
    Backend.submit(GenerateRequest) -> RequestStream
      |
      |  RequestStream.next                   [SequenceOutput], in order and without repeats
      |  answer/generation.Generation.next    detokenised, stop strings found: [Step]
      |  answer/loop._answer                  the one loop, for every endpoint, streamed or not
      |  answer/chat._Chat.take               Step -> text, reasoning, calls (answer/reader) -> chunk (answer/chunks)
      |  http/call.Call.write                 a stream's events; Call.answer for a body
      v
    bytes of the server

What was decided where OpenAI leaves it open:

- The status of a stream is sent with its first token, so that an error before it has its proper status. A later error is an
  event `data: {"error": {...}}` that ends the stream without `[DONE]`; the official SDK raises APIError on it.
- One event per token: the first one carries the role, the last one the finish reason. Text that may be the beginning of a
  stop string or of a character is held back, so an event's text may be empty.
- With API keys set, everything needs one but /health, /metrics, and the pages for browsers, which hold nothing of the server.
- `x-request-id` is the client's `request_id` or `rid`, else the header it sent, else the id of the answer.
- The role `developer` is rendered as `system`. Text parts of a message are joined by newlines.
- A template that has no variable for tools gets the Hermes system message instead; see `prompt/tools`.
"""
