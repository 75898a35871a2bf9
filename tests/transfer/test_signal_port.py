"""--signal-port: a prefill worker listens for decode workers where it is told, or says why it cannot."""

from __future__ import annotations

import socket

import pytest
from relay_pair import Side

from kvrelay.errors import ConfigError
from kvrelay.worker import relay


def test_a_producer_listens_on_its_port_and_refuses_a_port_in_use() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    producer = relay._producer(Side("prefill", None).parts, "127.0.0.1", port)
    try:
        assert producer.signal_address.endswith(f":{port}")
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port} \(--signal-port\): Address already in use"):
            relay._producer(Side("prefill", None).parts, "127.0.0.1", port)
    finally:
        producer.close()
