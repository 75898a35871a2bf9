"""Images in prompts: how they are read, brought to size and cut into patches, and what stands for them among the tokens."""
