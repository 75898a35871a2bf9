"""Tool calling: the model has to call a function and receives its result. Usage: tools.py [URL]"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 30}}, "required": ["city"]}
weather = {"name": "get_weather", "description": "The weather in a city right now.", "parameters": city}
tools = [{"type": "function", "function": weather}]
named = {"type": "function", "function": {"name": "get_weather"}}

messages = [{"role": "user", "content": "What is the weather in Paris?"}]
reply = client.chat.completions.create(
    model=model, messages=messages, tools=tools, tool_choice=named, temperature=0, max_tokens=100
)
call = reply.choices[0].message.tool_calls[0]
print(f"the model calls {call.function.name}({json.loads(call.function.arguments)})")

messages.append({"role": "assistant", "content": None, "tool_calls": [call.model_dump()]})
messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 degrees, light rain"})
reply = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=60)
print(reply.choices[0].message.content)
