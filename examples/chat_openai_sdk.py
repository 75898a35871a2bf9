"""A conversation through the official OpenAI SDK. Usage: chat_openai_sdk.py [URL]"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

messages = [{"role": "user", "content": "What is the capital of France?"}]
reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
print(reply.choices[0].message.content)

messages.append({"role": "assistant", "content": reply.choices[0].message.content})
messages.append({"role": "user", "content": "What is the capital of Italy?"})
reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=40)
print(reply.choices[0].message.content)

details = reply.usage.prompt_tokens_details
cached = details.cached_tokens if details else 0
print(f"{reply.usage.prompt_tokens} prompt tokens ({cached} from cache), {reply.usage.completion_tokens} new")
