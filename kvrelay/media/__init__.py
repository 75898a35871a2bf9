"""Images in prompts: how they are fetched, read, resized and cut into patches, and their placeholders among the tokens."""
