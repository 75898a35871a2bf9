"""Workers on one host whose KV is on NVIDIA cards."""
