"""--signal-port: a prefill worker listens for decode workers where it is told, or says why it cannot."""

from __future__ import annotations

import socket

import pytest
from relay_pair import Side

from kvrelay.errors import ConfigError
from kvrelay.transfer.kv.producer import RelayProducer
from kvrelay.worker.transports import signal_port


def test_a_producer_listens_on_its_port_and_refuses_a_port_in_use() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    producer = RelayProducer(Side("prefill", None).parts, listen_host="127.0.0.1", listen_port=port)
    try:
        assert producer.signal_address.endswith(f":{port}")
        in_use = rf"127\.0\.0\.1:{port} \(--signal-port\): Address already in use"
        with pytest.raises(ConfigError, match=in_use), signal_port("127.0.0.1", port):
            RelayProducer(Side("prefill", None).parts, listen_host="127.0.0.1", listen_port=port)
    finally:
        producer.close()
