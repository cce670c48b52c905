"""Options: what is allowed, and that everything else is refused in words that say so."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from lrq_ha.lab.certificates import Authority
from lrq_ha.replication.positions import Position
from lrq_ha.spark.errors import OptionError
from lrq_ha.spark.options import ALLOWED, COLUMNS, EARLIEST, LATEST, matching, parse_options

pytestmark = pytest.mark.quick

NODES = {"nodes": "amqp://u:p@h:1"}
QUEUE = {"subscribe": "LRQ_Recv_a_east"}


def test_defaults() -> None:
    options = parse_options(NODES | QUEUE)
    assert options.access.nodes == ("amqp://u:p@h:1",)
    assert options.subscribe == ("LRQ_Recv_a_east",)
    assert (options.starting, options.ending) == (EARLIEST, LATEST)
    assert options.min_partitions == 1
    assert options.fail_on_data_loss
    assert not options.include_chain


def test_case_does_not_matter_and_lists_are_trimmed() -> None:
    options = parse_options(
        {"NODES": "amqp://h:1, amqps://g:2,", "SubScribe": "LRQ_Recv_a_east , LRQ_Recv_a_west,LRQ_Recv_a_east"}
    )
    assert options.access.nodes == ("amqp://h:1", "amqps://g:2")
    assert options.subscribe == ("LRQ_Recv_a_east", "LRQ_Recv_a_west")


def test_offsets() -> None:
    options = parse_options(
        NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": 7}', "endingOffsets": '{"LRQ_Recv_a_east": -1}'}
    )
    assert options.starting == {"LRQ_Recv_a_east": 7}
    assert options.ending == {"LRQ_Recv_a_east": -1}
    assert parse_options(NODES | QUEUE | {"startingOffsets": "Earliest", "endingOffsets": "latest"}).starting == EARLIEST
    assert parse_options(NODES | QUEUE | {"startingOffsets": "latest"}).starting == LATEST
    given = parse_options(NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": {"epoch": 257, "sequence": 9}}'})
    assert given.starting == {"LRQ_Recv_a_east": Position(257, 9)}


def test_columns_are_those_wanted_in_their_order() -> None:
    assert parse_options(NODES | QUEUE).wanted_columns == COLUMNS[:-2]
    assert parse_options(NODES | QUEUE | {"includeChain": "true"}).wanted_columns == COLUMNS
    assert parse_options(NODES | QUEUE | {"columns": "payload, restart"}).wanted_columns == ("payload", "restart")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (NODES | QUEUE | {"prefetch": "3"}, "Unknown option 'prefetch'.*startingOffsets"),
        (QUEUE, "nodes is missing"),
        ({"nodes": "h:5672"} | QUEUE, "Address 1 of option nodes is malformed.*amqp://HOST"),
        ({"nodes": "amqp://u:p@h:1/lrq,amqp://u:p@h:2/shop"} | QUEUE, "Address 2 of option nodes has another virtual host"),
        ({"nodes": "amqp://u:p@h?heartbeat=5"} | QUEUE, "Address 1 of option nodes has options behind"),
        ({"nodes": "amqp://u@h"} | QUEUE, "Address 1 of option nodes has a user and no password"),
        (NODES, "Exactly one of the options subscribe and subscribePattern"),
        (NODES | QUEUE | {"subscribePattern": ".*"}, "Exactly one of the options"),
        (NODES | {"subscribe": "orders"}, "subscribe = 'orders'.*LRQ_Recv_<client_name>_<remote_id>"),
        (NODES | {"subscribePattern": "LRQ_.*"}, "needs option http"),
        (NODES | {"subscribePattern": "(", "http": "http://h:1"}, "no regular expression"),
        (NODES | {"subscribePattern": ".*", "http": "h:1"}, "Address 1 of option http is malformed.*http://HOST"),
        (NODES | QUEUE | {"startingOffsets": "newest"}, "startingOffsets = 'newest'.*earliest"),
        (NODES | QUEUE | {"maxOffsetsPerTrigger": "5"}, "maxOffsetsPerTrigger.*The option for it is maxEntriesPerTrigger"),
        (NODES | QUEUE | {"columns": "payload,colour"}, "columns names 'colour'.*replication_id"),
        (NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": {"epoch": 257}}'}, "startingOffsets"),
        (NODES | QUEUE | {"startingOffsets": "[1]"}, "startingOffsets"),
        (NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": "7"}'}, "startingOffsets"),
        (NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": true}'}, "startingOffsets"),
        (NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_a_east": -3}'}, "startingOffsets"),
        (NODES | QUEUE | {"startingOffsets": '{"LRQ_Recv_b_east": 1}'}, "LRQ_Recv_b_east.*LRQ_Recv_a_east"),
        (NODES | QUEUE | {"endingOffsets": "earliest"}, "endingOffsets = 'earliest'.*latest"),
        (NODES | QUEUE | {"endingOffsets": '{"LRQ_Recv_a_east": -2}'}, "endingOffsets"),
        (NODES | QUEUE | {"startingTimestamp": "soon"}, "startingTimestamp = 'soon'.*ms since 1970"),
        (NODES | QUEUE | {"startingTimestamp": "5", "startingOffsets": "latest"}, "startingTimestamp and startingOffsets are given"),
        (NODES | QUEUE | {"endingTimestamp": "5", "endingOffsets": "latest"}, "endingTimestamp and endingOffsets are given"),
        (NODES | QUEUE | {"startingTimestamp": "5", "startingOffsetsByTimestampStrategy": "first"}, "Strategy = 'first'.*latest"),
        (NODES | QUEUE | {"maxEntriesPerPartition": "0"}, "maxEntriesPerPartition = '0'.*whole number >= 1"),
        (NODES | QUEUE | {"user": "u"}, "Option user is given, and an address in nodes has a user"),
        (NODES | QUEUE | {"password": "p"}, "A password is given without option user"),
        (NODES | QUEUE | {"user": "u", "password": "p", "passwordFile": "/p"}, "password and passwordFile are given"),
        (NODES | QUEUE | {"tlsKey": "/k"}, "tlsKey is given without tlsCert"),
        (NODES | QUEUE | {"minPartitions": "0"}, "minPartitions = '0'.*whole number >= 1"),
        (NODES | QUEUE | {"minPartitions": "two"}, "minPartitions"),
        (NODES | QUEUE | {"maxEntriesPerTrigger": "-5"}, "maxEntriesPerTrigger = '-5'.*whole number >= 1"),
        (NODES | QUEUE | {"failOnDataLoss": "yes"}, "failOnDataLoss = 'yes'.*true or false"),
    ],
)
def test_what_is_refused(given: dict[str, str], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        parse_options(given)


@pytest.mark.parametrize("option", ["nodes", "http"])
@pytest.mark.parametrize(
    "address",
    ["ftp://u:secret@h:1", "amqp://u:secret/more@h:1", "amqp://u:12/secret@h:1", "amqp://u:1?secret@h", "amqp://u:a,secret@h:1", "amqp://u:sec℀ret@h"],
)
def test_a_refusal_shows_no_part_of_a_password(option: str, address: str) -> None:
    given = NODES | {"subscribePattern": ".*", "http": "http://h:1", option: address.replace("amqp", "amqp" if option == "nodes" else "http")}
    with pytest.raises(OptionError, match=f"Address [12] of option {option} is malformed") as caught:
        parse_options(given)
    assert "sec" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_what_pika_does_not_know_in_an_address_is_refused() -> None:
    with pytest.raises(OptionError, match="Address 2 of option nodes has options behind") as caught:
        parse_options(NODES | {"nodes": "amqp://127.0.0.1:1,amqp://u:secret@h:1?what=secret"})
    assert "secret" not in str(caught.value)


def test_a_file_of_authorities_that_cannot_be_used_is_named() -> None:
    with pytest.raises(OptionError, match="tlsCa = '/nowhere' cannot be used: No such file"):
        parse_options(NODES | {"subscribe": "LRQ_Recv_a_east", "tlsCa": "/nowhere"}).access.reader_parameters()


def test_a_client_certificate_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """One that is missing, and a key with a passphrase, for which nothing may ask at the terminal."""
    access = parse_options(NODES | QUEUE | {"tlsCert": "/nowhere.pem"}).access
    with pytest.raises(OptionError, match=r"tlsCert = '/nowhere\.pem' cannot be used: No such file"):
        access.tls_context()
    certificate, key = Authority(tmp_path).issue("client", "client")
    locked = tmp_path / "locked.pem"
    subprocess.run(["openssl", "pkey", "-in", key, "-aes256", "-passout", "pass:secret", "-out", locked], check=True)
    access = parse_options(NODES | QUEUE | {"tlsCert": str(certificate), "tlsKey": str(locked)}).access
    with pytest.raises(OptionError, match=r"tlsCert = .* with tlsKey = .*locked.pem' cannot be used"):
        access.tls_context()


def test_a_user_in_an_address_keeps_each_character() -> None:
    access = parse_options({"nodes": "amqp://h:1,amqps://g"} | QUEUE | {"user": "a@b", "password": "p/w %"}).access
    found = access.reader_parameters()
    assert [(one.host, one.port, one.credentials.username, one.credentials.password) for one in found] == [
        ("h", 1, "a@b", "p/w %"),
        ("g", 5671, "a@b", "p/w %"),
    ]
    assert "p/w" not in repr(access)
    assert "p%2Fw" not in repr(access)


def test_every_option_is_described() -> None:
    assert all(ALLOWED.values())


def test_patterns_match_whole_names_of_receive_queues_only() -> None:
    names = ["LRQ_Recv_b_east", "LRQ_Recv_a_east", "LRQ_Recv_a_eastern", "LRQ_Status", "other"]
    assert matching("LRQ_Recv_.*_east", names) == ("LRQ_Recv_a_east", "LRQ_Recv_b_east")
    assert matching(".*", names) == ("LRQ_Recv_a_east", "LRQ_Recv_a_eastern", "LRQ_Recv_b_east")
