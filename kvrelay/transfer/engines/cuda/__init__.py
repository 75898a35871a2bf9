"""Workers on one host whose memory is on NVIDIA cards."""
