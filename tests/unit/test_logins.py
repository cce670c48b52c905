"""What stands in the frames of a login: mechanisms, credentials, properties, addresses."""

from __future__ import annotations

import pytest
from pamqp import commands
from pamqp.common import FieldTable

from broker_plugin.amqp import content_header, encode, frames, sasl
from broker_plugin.amqp.sasl import Credentials
from broker_plugin.log import producers


def payload(method: object) -> bytes:
    return encode.method_frame(0, method)[7:-1]  # type: ignore[arg-type]


def start_ok(properties: bytes, mechanism: str, response: bytes) -> bytes:
    table, answer = (len(part).to_bytes(4, "big") + part for part in (properties, response))
    return encode.raw_method_frame(0, frames.CONNECTION_START_OK, table, encode.short_string(mechanism), answer, b"\x05en_US")[7:-1]


@pytest.mark.parametrize(
    ("offered", "external", "kept"),
    [
        ("PLAIN AMQPLAIN", False, ["PLAIN", "AMQPLAIN"]),
        ("EXTERNAL PLAIN RABBIT-CR-DEMO", False, ["PLAIN"]),
        ("EXTERNAL PLAIN", True, ["EXTERNAL", "PLAIN"]),
        ("PLAIN", True, ["EXTERNAL", "PLAIN"]),
        ("EXTERNAL", True, []),
        ("EXTERNAL", False, []),
    ],
)
def test_only_what_the_door_understands_is_offered(offered: str, external: bool, kept: list[str]) -> None:
    properties: FieldTable = {"product": "RabbitMQ", "capabilities": {"basic.nack": True}}
    changed, left = sasl.offer(payload(commands.Connection.Start(0, 9, properties, offered, "en_US")), external)
    assert left == kept
    start = frames.decode_method(changed)
    assert (start.mechanisms, start.locales, start.server_properties) == (" ".join(kept), "en_US", properties)  # type: ignore[attr-defined]


def test_credentials_of_a_table_are_the_first_of_each_key_and_only_these_are_sent_on() -> None:
    fields = [(b"LOGIN", b"a"), (b"LOGIN", b"b"), (b"PASSWORD", b"1"), (b"PASSWORD", b"2"), (b"more", b"x")]
    answer = sasl.parse_start_ok(start_ok(b"", "AMQPLAIN", b"".join(content_header.field(k, v) for k, v in fields)))
    who = sasl.credentials(answer)
    assert who == Credentials(b"a", b"1")
    sent = sasl.parse_start_ok(b"\0\x0a\0\x0b" + sasl.encode_start_ok(answer, who, answer.properties))
    assert sent.response == content_header.field(b"LOGIN", b"a") + content_header.field(b"PASSWORD", b"1")
    assert sasl.credentials(sent) == who


@pytest.mark.parametrize("response", [b"", b"\0a", b"x\0a\0b", b"\0a\0b\0c", b"a\0b"])
def test_a_response_of_another_form_is_nobodys(response: bytes) -> None:
    assert sasl.credentials(sasl.parse_start_ok(start_ok(b"", "PLAIN", response))) is None


def test_external_goes_to_the_broker_as_plain() -> None:
    answer = sasl.parse_start_ok(start_ok(b"", "EXTERNAL", b""))
    assert sasl.credentials(answer) is None
    sent = sasl.parse_start_ok(b"\0\x0a\0\x0b" + sasl.encode_start_ok(answer, Credentials(b"app", b"secret"), b""))
    assert (sent.mechanism, sent.response) == ("PLAIN", b"\0app\0secret")


def test_what_is_printed_holds_no_password() -> None:
    answer = sasl.parse_start_ok(start_ok(content_header.field(b"k", b"hidden"), "PLAIN", b"\0app\0hidden"))
    assert "hidden" not in f"{answer!r}{sasl.credentials(answer)!r}"


@pytest.mark.parametrize("name", [b"", b"orders"])
def test_the_address_is_the_doors_word(name: bytes) -> None:
    """The name is the client's, if it has one: who looks connections up by their names found none."""
    given = content_header.field(b"lrq_client_address", b"forged") + content_header.field(b"other", b"kept")
    given += content_header.field(b"connection_name", name) if name else b""
    kept = sasl.with_address(given, "192.0.2.1:99")
    fields = [kept[start + 1 : value] + b"=" + kept[value + 5 : end] for start, value, end in content_header.fields(kept, 0, len(kept))]
    expected = name or b"192.0.2.1:99"
    assert fields == [b"other=kept", b"connection_name=" + expected, b"lrq_client_address=192.0.2.1:99"]
    assert b"forged" not in sasl.with_address(given, "")
    assert b"connection_name" not in sasl.with_address(content_header.field(b"other", b"kept"), "")


def _table(key: bytes, *fields: bytes) -> bytes:
    inner = b"".join(fields)
    return bytes((len(key),)) + key + b"F" + len(inner).to_bytes(4, "big") + inner


def _flag(name: bytes, value: bool) -> bytes:
    return bytes((len(name),)) + name + b"t" + bytes((value,))


@pytest.mark.parametrize(
    ("given", "others"),
    [
        (b"", []),
        (_table(b"capabilities", _flag(b"basic.nack", True)), [b"basic.nack"]),
        (_table(b"capabilities", _flag(b"connection.blocked", False), _flag(b"basic.nack", True)), [b"basic.nack"]),
        (content_header.field(b"capabilities", b"none") + _table(b"capabilities", _flag(b"connection.blocked", False)), []),
    ],
)
def test_the_door_is_told_of_alarms_whatever_the_client_understands(given: bytes, others: list[bytes]) -> None:
    """A broker takes the first of two fields with the same key."""
    asked = sasl.told_of_alarms(given + content_header.field(b"other", b"kept"))
    assert [asked[start + 1 : value] for start, value, _ in content_header.fields(asked, 0, len(asked))] == [b"other", b"capabilities"]
    assert sasl.capability(asked, b"connection.blocked")
    assert [name for name in (b"basic.nack", b"publisher_confirms") if sasl.capability(asked, name)] == others


def test_own_properties_are_the_first_of_each_key() -> None:
    table = content_header.field(b"lrq_site", b"west") + content_header.field(b"lrq_site", b"east") + content_header.field(b"a", b"b")
    table += b"\x08lrq_nodeb\x02" + b"\x06lrq_xxt\x01"
    assert sasl.own_properties(table) == {"lrq_site": "west", "lrq_node": 2, "lrq_xx": 1}


@pytest.mark.parametrize(
    ("address", "loopback"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::ffff:192.0.2.1", False), ("192.0.2.1", False),
     ("fe80::1%eth0", False), ("::1%lo", True), ("", False), ("localhost", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_loopback(address: str, loopback: bool) -> None:
    assert sasl.is_loopback(address) == loopback


@pytest.mark.parametrize(
    ("subject", "name"),
    [
        (((("commonName", "orders"),),), "orders"),
        (((("organizationName", "x"),), (("commonName", "orders"),)), "orders"),
        (((("commonName", "orders"),), (("commonName", "admin"),)), ""),
        ((), ""),
    ],
)
def test_a_certificate_has_one_common_name_or_none(subject: tuple[tuple[tuple[str, str], ...], ...], name: str) -> None:
    assert sasl.common_name({"subject": subject}) == name
    assert sasl.common_name(None) == ""


def test_a_user_cannot_pass_for_another_by_the_end_of_its_name() -> None:
    assert producers.producer_key("/", "a:b", "c") != producers.producer_key("/", "a", "b:c")


NAMES = ["/", "a", "a/b", "%2F", "b/a", "a%2Fb"]


def test_a_producers_key_has_one_meaning() -> None:
    """Slashes and percent signs stand in names of vhosts and users, too."""
    keys = {producers.producer_key(vhost, user, "p"): (vhost, user) for vhost in NAMES for user in NAMES}
    assert len(keys) == len(NAMES) ** 2
    for key, (_, user) in keys.items():
        assert producers.split_key(key) == (user, "p")
    known = producers.ProducerKeys()
    for user in NAMES:
        assert [keys[key] for key in known.of(user, "p", keys)] == [(vhost, user) for vhost in NAMES]
        assert not known.of(user, "other", keys)


def test_a_producers_keys_are_found_without_a_look_at_all() -> None:
    """Who asks pipelines thousands of questions of forty bytes; each cost the time to look at every producer of the log."""

    class Counted(str):
        looks = 0

        def partition(self, sep: str, /) -> tuple[str, str, str]:
            Counted.looks += 1
            return super().partition(sep)

    known, many = producers.ProducerKeys(), 1_000
    keys = dict.fromkeys(Counted(producers.producer_key("/", "app", f"p{number}")) for number in range(many))
    for number in range(many):
        assert known.of("app", f"p{number}", keys) == [f"%2F/app/p{number}"]
    assert Counted.looks == many
    keys[Counted(producers.producer_key("lrq", "app", "p7"))] = None
    assert known.of("app", "p7", keys) == ["%2F/app/p7", "lrq/app/p7"]
    assert Counted.looks == many + 1
    assert known.of("app", "p7", {"lrq/app/p7": 1}) == ["lrq/app/p7"]


NODE = Credentials(b"lrq", b"between nodes")
RELAYED = content_header.field(b"product", b"x")


def relayed(address: str = "192.0.2.1:99", *, mechanism: str = "PLAIN", by: Credentials = NODE) -> sasl.StartOk:
    answer = sasl.parse_start_ok(start_ok(RELAYED, mechanism, b"\0app\0secret"))
    return sasl.parse_start_ok(b"\0\x0a\0\x0b" + sasl.relay(answer, Credentials(b"app", b"secret"), address, by))


@pytest.mark.parametrize("mechanism", ["PLAIN", "AMQPLAIN", "EXTERNAL"])
def test_a_relayed_login_claims_the_clients_address_and_is_the_clients_own(mechanism: str) -> None:
    answer = relayed(mechanism=mechanism)
    assert sasl.claimed_address(answer, NODE) == "192.0.2.1:99"
    assert sasl.credentials(answer) == Credentials(b"app", b"secret")
    assert b"between nodes" not in answer.properties
    assert sasl.with_address(answer.properties, "") == RELAYED, "the broker sees no claim and no proof"


def test_a_claim_without_its_proof_is_refused() -> None:
    good = relayed()
    proof = sasl.own_properties(good.properties)["lrq_relay_proof"].encode()

    def claim(address: bytes, *proofs: bytes, response: bytes = good.response) -> sasl.StartOk:
        fields = content_header.field(b"lrq_relayed", address) + b"".join(content_header.field(b"lrq_relay_proof", one) for one in proofs)
        return sasl.parse_start_ok(start_ok(fields, "PLAIN", response))

    assert sasl.claimed_address(claim(b"192.0.2.1:99", proof), NODE) == "192.0.2.1:99"
    wrong = [
        claim(b"192.0.2.1:99"), claim(b"192.0.2.1:99", b""), claim(b"192.0.2.1:98", proof), claim(b"192.0.2.1:99", b"0" * 64, proof),
        claim(b"192.0.2.1:99", proof, response=b"\0other\0secret"),
        relayed(by=Credentials(b"lrq", b"wrong")), relayed(by=Credentials(b"other", NODE.password)),
        claim(b"\xff", b"\xff"),
    ]  # fmt: skip
    for answer in wrong:
        with pytest.raises(frames.FrameError, match="for the nodes of this group"):
            sasl.claimed_address(answer, NODE)
    assert sasl.claimed_address(sasl.parse_start_ok(start_ok(RELAYED, "PLAIN", b"")), NODE) is None
