"""The PROXY protocol's header, against the octets of its specification."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.amqp.proxy_header import ProxyHeaderError, believe, parse_v1, parse_v2, proxy_header, rest_of_v2

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


ENDS = ("192.0.2.1", 258), ("198.51.100.2", 5672)
ADDRESSES = "c0000201" + "c6336402" + "0102" + "1628"
V2_HEADS = {
    "a TCP connection": (TCP4 + ADDRESSES, ENDS),
    "fields behind it": (SIGNATURE + "21110013" + ADDRESSES + "04000400000000", ENDS),
    "IPv6": (TCP6 + "20010db8" + "0" * 23 + "1" + "20010db8" + "0" * 23 + "2" + "0001" + "0002", (("2001:db8::1", 1), ("2001:db8::2", 2))),
    "a health check": (SIGNATURE + "20000000", None),
    "a health check with addresses": (SIGNATURE + "2011000c" + ADDRESSES, None),
    "no family": (SIGNATURE + "21000000", None),
    "a socket of Unix": (SIGNATURE + "213100d8" + "00" * 216, None),
}


@pytest.mark.parametrize("name", V2_HEADS)
def test_version_2_is_read(name: str) -> None:
    octets, ends = V2_HEADS[name]
    data = bytes.fromhex(octets)
    assert read_v2(data) == ends


@pytest.mark.parametrize(
    "octets",
    [
        "0d0a0d0a000d0a515549540b" + "2111000c" + "00" * 12,  # another signature
        SIGNATURE + "1111000c" + "00" * 12,  # version 1 in the form of version 2
        SIGNATURE + "2211000c" + "00" * 12,  # no such command
        SIGNATURE + "21111001" + "00" * 0x1001,  # too long
        SIGNATURE + "2112000c" + "00" * 12,  # UDP
        SIGNATURE + "2111000b" + "00" * 11,  # too short
        SIGNATURE + "2121000c" + "00" * 12,
        SIGNATURE + "2141000c" + "00" * 12,  # no such family
    ],
)
def test_another_form_of_version_2_is_refused(octets: str) -> None:
    data = bytes.fromhex(octets)
    with pytest.raises(ProxyHeaderError):
        read_v2(data)


def read_v2(data: bytes) -> object:
    assert rest_of_v2(data[:16]) == len(data) - 16
    return parse_v2(data[:16], data[16:])


@pytest.mark.parametrize(
    ("line", "ends"),
    [
        (b"PROXY TCP4 192.0.2.1 198.51.100.2 258 5672\r\n", ENDS),
        (b"PROXY TCP6 2001:db8::1 2001:db8::2 0 65535\r\n", (("2001:db8::1", 0), ("2001:db8::2", 65535))),
        (b"PROXY UNKNOWN\r\n", None),
        (b"PROXY UNKNOWN ffff::1 ffff::2 1 2\r\n", None),
    ],
)
def test_version_1_is_read(line: bytes, ends: object) -> None:
    assert parse_v1(line) == ends


@pytest.mark.parametrize(
    "line",
    [
        b"PROXY\r\n", b"PROXY \r\n", b"PROXY TCP4\r\n", b"PROXY TCP5 192.0.2.1 198.51.100.2 258 5672\r\n",
        b"PROXY TCP4 192.0.2.1 198.51.100.2 258\r\n", b"PROXY TCP4  192.0.2.1 198.51.100.2 258 5672\r\n",
        b"PROXY TCP4 192.0.2.1 198.51.100.2 258 5672 \r\n", b"PROXY TCP4 192.0.2.256 198.51.100.2 258 5672\r\n",
        b"PROXY TCP4 2001:db8::1 198.51.100.2 258 5672\r\n", b"PROXY TCP4 192.0.2.1 198.51.100.2 65536 5672\r\n",
        b"PROXY TCP4 192.0.2.1 198.51.100.2 -1 5672\r\n", b"PROXY TCP4 192.0.2.1 198.51.100.2 01 5672\r\n",
        b"PROXY TCP4 \xff 198.51.100.2 1 5672\r\n", b"PROXY TCP4 192.0.2.1 198.51.100.2 \xb2 5672\r\n",
    ],
)  # fmt: skip
def test_another_form_of_version_1_is_refused(line: bytes) -> None:
    with pytest.raises(ProxyHeaderError):
        parse_v1(line)


@pytest.mark.parametrize(
    ("claimed", "by", "believed"),
    [
        ("192.0.2.1", "10.0.0.5", "192.0.2.1"),
        ("192.0.2.1", "127.0.0.1", "192.0.2.1"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("127.0.0.1", "10.0.0.5", "10.0.0.5"),
        ("::1", "10.0.0.5", "10.0.0.5"),
        ("::ffff:127.0.0.1", "10.0.0.5", "10.0.0.5"),
    ],
)
def test_no_other_machine_claims_a_loopback_address_of_this_one(claimed: str, by: str, believed: str) -> None:
    assert believe((claimed, 1), (by, 2))[0] == believed


@given(st.binary(max_size=600))
def test_any_bytes_are_a_header_or_refused(data: bytes) -> None:
    with suppress(ProxyHeaderError):
        parse_v1(b"PROXY " + data)
    head = bytes.fromhex(SIGNATURE) + data[:4].ljust(4, b"\0")
    with suppress(ProxyHeaderError):
        rest = rest_of_v2(head)
        parse_v2(head, data[4:].ljust(rest, b"\0"))
