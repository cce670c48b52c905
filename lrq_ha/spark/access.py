"""The way to the nodes: addresses, user, password and certificates, as one checked value. Reads and writes have its options in common.

Rules: a password is read where a connection is made, so that `passwordFile` and the environment are each machine's own; no address and no
password is shown.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pika

from lrq_ha import urls
from lrq_ha.spark.errors import OptionError
from lrq_ha.streams.node_connection import address_of

PASSWORD_VARIABLE = "LRQ_PASSWORD"
ALLOWED = {
    "nodes": "AMQP addresses, comma separated: amqp://HOST:PORT,… with option user, or amqp://USER:PASSWORD@HOST:PORT,… (no options behind a ?)",
    "user": f"the user, for addresses without one; the password is in passwordFile, password, or the environment variable {PASSWORD_VARIABLE}",
    "password": "the password of option user",
    "passwordFile": "path of a file with the password of option user, with one path on every worker",
    "tlsCa": "for amqps:// addresses: path of a PEM file with those who may sign their certificates, with one path on every worker",
    "tlsCert": "for amqps:// addresses: path of a PEM file with the client's own certificate, with one path on every worker",
    "tlsKey": "path of a PEM file with the key of tlsCert, without a passphrase, if tlsCert does not have the key, too",
}
MALFORMED = "is malformed"
_NODE = r"amqps?://[^/?#].*"


@dataclass(frozen=True)
class Access:
    """How nodes are reached.

    Attributes:
        nodes: AMQP addresses to try in turn; at least one.
        user: The user, or None: each address has its own.
        password: Of `user`; None: it is in `password_file` or in the environment.
        password_file: Path of a file, or None.
        tls_ca: Path of a PEM file, or None for the system's trusted CAs.
        tls_cert, tls_key: Paths of PEM files, or None: no client certificate.
    """

    nodes: tuple[str, ...] = field(repr=False)
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: str | None = None
    tls_ca: str | None = None
    tls_cert: str | None = None
    tls_key: str | None = None

    def full_addresses(self) -> list[str]:
        """The addresses, with the user. Raises OptionError if the password cannot be had on this machine."""
        if self.user is None:
            return list(self.nodes)
        password = self._read_password()
        return [urls.with_user(node, self.user, password) for node in self.nodes]

    def tls_context(self) -> ssl.SSLContext | None:
        """For amqps:// addresses; None: the system's trusted CAs. Raises OptionError for a PEM file that cannot be used."""
        if self.tls_ca is None and self.tls_cert is None:
            return None
        try:
            context = ssl.create_default_context(cafile=self.tls_ca)
        except OSError as error:  # ssl's errors, too
            raise _unusable("tlsCa", self.tls_ca, error) from error
        if self.tls_cert is not None:
            try:
                context.load_cert_chain(self.tls_cert, self.tls_key, password=str)  # an empty passphrase, so that nothing asks for one
            except OSError as error:
                raise _unusable("tlsCert", self.tls_cert, error, f" with tlsKey = {self.tls_key!r}" if self.tls_key else "") from error
        return context

    def reader_parameters(self) -> list[pika.ConnectionParameters]:
        """The nodes, for a reader's connection. Raises OptionError as the two methods above do."""
        tls = self.tls_context()
        return [address_of(node, tls) for node in self.full_addresses()]

    def _read_password(self) -> str:
        if self.password is not None:
            return self.password
        if self.password_file is None:
            try:
                return os.environ[PASSWORD_VARIABLE]
            except KeyError:
                raise OptionError(
                    f"Option user has no password on this machine: {PASSWORD_VARIABLE} is not in the environment",
                    todo=f"Set it for the driver and each worker, or passwordFile: {ALLOWED['passwordFile']}",
                ) from None
        try:
            return Path(self.password_file).read_text().rstrip("\r\n")
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise OptionError(
                f"passwordFile = {self.password_file!r} cannot be used: {reason}", todo=f"Allowed: {ALLOWED['passwordFile']}"
            ) from error


def parse_access(given: Mapping[str, str], vhost: str) -> Access:
    """Checks the options of `ALLOWED` among those given.

    Args:
        given: Options, by their names in `ALLOWED`.
        vhost: The virtual host that an address may name.

    Raises:
        OptionError: An address is malformed or missing, or two options contradict each other.
    """
    nodes = checked_addresses("nodes", ALLOWED["nodes"], given.get("nodes"), _NODE, vhost)
    if not nodes:
        raise OptionError("Option nodes is missing", todo=f"Allowed: {ALLOWED['nodes']}")
    access = Access(
        nodes=nodes,
        user=given.get("user"),
        password=given.get("password"),
        password_file=given.get("passwordFile"),
        tls_ca=given.get("tlsCa"),
        tls_cert=given.get("tlsCert"),
        tls_key=given.get("tlsKey"),
    )
    if access.password is not None and access.password_file is not None:
        raise OptionError("Options password and passwordFile are given", todo="Leave out one of the two")
    if access.user is None and (access.password is not None or access.password_file is not None):
        raise OptionError("A password is given without option user", todo=f"user: {ALLOWED['user']}")
    if access.user is not None and any(urls.split(node).username is not None for node in access.nodes):
        raise OptionError("Option user is given, and an address in nodes has a user", todo="Leave the user out of all addresses, or option user")
    if access.tls_key is not None and access.tls_cert is None:
        raise OptionError("Option tlsKey is given without tlsCert", todo=f"tlsCert: {ALLOWED['tlsCert']}")
    return access


def words(value: str | None) -> tuple[str, ...]:
    """The words between commas, each once."""
    return tuple(dict.fromkeys(word.strip() for word in (value or "").split(",") if word.strip()))


def checked_addresses(name: str, allowed: str, value: str | None, form: str, *vhosts: str) -> tuple[str, ...]:
    """The addresses in an option, each once.

    Args:
        name: The option.
        allowed: What it may be, for an error.
        value: Its value; None: it is not given.
        form: A regular expression for an address.
        vhosts: Virtual hosts that an address may name.

    Raises:
        OptionError: An address is malformed, or has a part that would not be used. No part of it is shown, as the end of its password is unknown.
    """
    addresses = words(value)
    for number, address in enumerate(addresses, 1):
        if fault := _fault_of(address, form, vhosts):
            raise OptionError(f"Address {number} of option {name} {fault}", todo=f"Allowed: {allowed}; {urls.PASSWORD_RULE}")
    return addresses


def _fault_of(address: str, form: str, vhosts: Sequence[str]) -> str:
    try:
        parts = urls.split(address)
    except ValueError:
        return MALFORMED
    if re.fullmatch(form, address) is None or not parts.hostname:
        return MALFORMED
    return urls.unused(parts, *vhosts)


def _unusable(option: str, path: str | None, error: OSError, beside: str = "") -> OptionError:
    return OptionError(f"{option} = {path!r}{beside} cannot be used: {error.strerror}", todo=f"Allowed: {ALLOWED[option]}")
