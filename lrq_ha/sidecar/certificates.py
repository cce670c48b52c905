"""When the certificates of this sidecar's own listeners expire, for /metrics.

Rule: the certificate in use counts, which the file may have replaced already: it is read by a handshake in memory, once for each new context.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from broker_plugin.amqp.tls import TlsFiles

_EXPIRED = 10  # OpenSSL: X509_V_ERR_CERT_HAS_EXPIRED
_ROUNDS_MAX = 4


def read_expiry(context: ssl.SSLContext, certificate: str) -> float:
    """When the certificate of a server's context expires.

    Args:
        context: Of the server.
        certificate: Its file, which is trusted here whoever has signed it.

    Returns:
        Unix time; 0 if it has expired.

    Raises:
        OSError: The file cannot be read, or has another certificate than the context.
    """
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.check_hostname = False
    asking.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    asking.load_verify_locations(certificate)
    try:
        client = shake_hands(asking, context)
    except ssl.SSLCertVerificationError as error:
        if error.verify_code == _EXPIRED:
            return 0.0
        raise
    found = (client.getpeercert() or {}).get("notAfter")
    if not isinstance(found, str):
        raise ssl.SSLError(f"no handshake with the certificate of {certificate}")
    return float(ssl.cert_time_to_seconds(found))


def shake_hands(asking: ssl.SSLContext, answering: ssl.SSLContext) -> ssl.SSLObject:
    """A client's end of a handshake in memory. Raises ssl.SSLError: It is refused; SSLCertVerificationError: by the client."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client, server = asking.wrap_bio(to_client, to_server), answering.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(_ROUNDS_MAX):
        try:
            client.do_handshake()
            break
        except ssl.SSLWantReadError:
            pass
        try:
            server.do_handshake()
        except ssl.SSLWantReadError:
            pass
    return client


class Expiries:
    """The times at which certificates expire.

    Args:
        listeners: The context and the certificate's file of each listener with TLS, by its table of the configuration.
    """

    def __init__(self, listeners: Mapping[str, tuple[TlsFiles, str]]) -> None:
        self._listeners = listeners
        self._known: dict[str, tuple[ssl.SSLContext, float]] = {}

    def read(self) -> dict[str, float]:
        """Unix time by listener; a certificate whose time cannot be read is left out."""
        for name, (files, certificate) in self._listeners.items():
            if self._known.get(name, (None,))[0] is not files.context:
                self._known.pop(name, None)
                try:
                    self._known[name] = files.context, read_expiry(files.context, certificate)
                except OSError:  # the file is being replaced: the next look finds the new context
                    pass
        return {name: at for name, (_, at) in self._known.items()}
