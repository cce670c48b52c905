"""The PROXY protocol's header, against the octets of its specification."""

from __future__ import annotations

import pytest

from broker_plugin.amqp.proxy_header import proxy_header

SIGNATURE = "0d0a0d0a000d0a515549540a"
TCP4, TCP6 = SIGNATURE + "2111000c", SIGNATURE + "21210024"


@pytest.mark.parametrize(
    ("source", "destination", "octets"),
    [
        (("192.0.2.1", 258), ("198.51.100.2", 5672), TCP4 + "c0000201" + "c6336402" + "0102" + "1628"),
        (("::ffff:192.0.2.1", 258), ("198.51.100.2", 5672), TCP4 + "c0000201" + "c6336402" + "0102" + "1628"),
        (("2001:db8::1", 1), ("2001:db8::2", 2), TCP6 + "20010db8" + "0" * 23 + "1" + "20010db8" + "0" * 23 + "2" + "0001" + "0002"),
        (("192.0.2.1", 1), ("2001:db8::2", 2), TCP6 + "0" * 20 + "ffffc0000201" + "20010db8" + "0" * 23 + "2" + "0001" + "0002"),
        (("fe80::1%eth0", 1), ("fe80::2%eth0", 2), TCP6 + "fe80" + "0" * 27 + "1" + "fe80" + "0" * 27 + "2" + "0001" + "0002"),
    ],
)
def test_octets(source: tuple[str, int], destination: tuple[str, int], octets: str) -> None:
    assert proxy_header(source, destination).hex() == octets
