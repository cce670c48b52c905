"""Which libraries' own tests are run, what of them, and where the door may differ from the broker.

Rules: versions are fixed; a suite is run as its authors wrote it, but for the address (`patches`, `files`); what is left out has a reason here, and
so has every test whose outcome may differ (`KNOWN`): that list is to shrink.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Source(Enum):
    """Where a library's tests are had."""

    SDIST = "its source package, by pip"
    CRATE = "its crate, by cargo"
    GIT = "its repository, by git"


@dataclass(frozen=True)
class Suite:
    """One library's tests.

    Attributes:
        library: Its name where it is published.
        version: The version whose tests are run.
        source: Where they are had.
        quick: What of them every test run takes: pytest's or cargo's arguments.
        everything: All of them that need a broker.
        repository: Where `GIT` clones from.
        patches: (file, what stands there, what is to): how the address gets in where the environment does not do.
        files: Our files (in `inside/`) that are laid into the sources, and where.
        left_out: Tests that are not run, and why. A pytest node id or the beginning of one.
    """

    library: str
    version: str
    source: Source
    quick: tuple[str, ...]
    everything: tuple[str, ...]
    repository: str = ""
    patches: tuple[tuple[str, str, str], ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    left_out: Mapping[str, str] = field(default_factory=dict)


_TLS = "TLS is the door's own business: tests/integration"
_PORT = 'int(__import__("os").environ["RABBITMQ_5672_TCP"])'
_FIRST_CHANNEL = "amqp_channel0-amqp]"  # of the four ways in which aiormq's tests open a channel

SUITES = (
    Suite(
        "amqp", "5.4.2", Source.SDIST,
        quick=("t/integration/test_rmq.py", "-k", "not tls"),
        everything=("t/integration/test_rmq.py", "-k", "not tls"),
    ),
    Suite(
        "kombu", "5.7.0", Source.SDIST,
        quick=("t/integration/test_py_amqp.py", "-k", "not TimeToLive and not Failover and not Priority"),
        everything=("t/integration/test_py_amqp.py",),
    ),
    Suite(
        "aiormq", "7.2.4", Source.SDIST,
        quick=("tests/test_channel.py", "tests/test_nowait.py", "tests/test_consumer_cancel.py", "tests/test_protocol_errors.py",
               "-k", f"{_FIRST_CHANNEL} or (not amqps and not amqp_channel and not named)"),
        everything=("tests", "-k", "not amqps"),
        files={"docker_client.py": "tests/docker_client.py", "aiormq_conftest.py": "conftest.py"},
        left_out={"tests/test_connection.py::test_ssl": _TLS, "tests/test_connection.py::test_auth_external": _TLS},
    ),
    Suite(
        "aio-pika", "10.2.1", Source.SDIST,
        quick=("tests/test_amqp.py::TestCaseAmqp", "tests/test_rpc.py", "tests/test_master.py", "-k", "not connect_robust"),
        everything=("tests",),
        files={"docker_client.py": "tests/docker_client.py"},
        left_out={"tests/test_amqps.py": _TLS, "tests/test_robust_recovery.py": "it stops the broker inside a container of its own"},
    ),
    Suite(
        "pika", "1.4.4", Source.GIT,
        repository="https://github.com/pika/pika",
        quick=("tests/acceptance/blocking_adapter_test.py", "tests/acceptance/async_adapter_tests.py", "tests/acceptance/twisted_adapter_tests.py",
               "-k", "not async_adapter or select_default"),
        everything=("tests/acceptance/blocking_adapter_test.py", "tests/acceptance/async_adapter_tests.py",
                    "tests/acceptance/enforce_one_basicget_test.py", "tests/acceptance/twisted_adapter_tests.py"),
        patches=(("tests/acceptance/blocking_adapter_test.py", "{'port': 5672}", f"{{'port': {_PORT}}}"),
                 ("tests/base/async_test_base.py", "port=5672", f"port={_PORT}")),
    ),
    Suite(
        "lapin", "4.12.3", Source.CRATE,
        quick=(),
        everything=(),
    ),
)

#: (library, pattern of a test's name, the version's series or "*"): why its outcome may differ through the door.
KNOWN: Mapping[tuple[str, str, str], str] = {
    **dict.fromkeys((
        ("kombu", "*::test_simple_*_publish_consume", "*"),
        ("aio-pika", "*::test_incoming_message_info*", "*"),
        ("pika", "*::TestBasicPublishWithoutPubacks::test", "*"),
        ("pika", "*::TestPublishAndBasicPublishWithPubacksUnroutable::test", "*"),
        ("pika", "*::TestPublishAndConsumeWithPubacksAndQosOfOne::test", "*"),
    ), "consumers see the header x-lrq-pos"),
}
