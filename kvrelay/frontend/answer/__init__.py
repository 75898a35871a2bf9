"""From tokens to an answer: one loop, and a shape each for chats, completions, responses and messages."""
