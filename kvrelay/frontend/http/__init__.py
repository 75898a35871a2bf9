"""The shell: one HTTP request as handlers see it, API keys, limits on connections, errors as OpenAI writes them."""
