"""A certificate authority of a lab's own, made with the `openssl` program.

Rule: keys are readable by the user alone, live as long as the lab's folder, and are good only for experiments.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from lrq_ha.lab.errors import LabError

_DAYS = "30"
_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Authority:
    """Signs certificates.

    Args:
        folder: Folder of all files; made if it does not exist.

    Attributes:
        ca: The authority's certificate (PEM).
    """

    def __init__(self, folder: Path, name: str = "lrq-ha lab") -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._folder = folder
        self.ca, self._key = folder / "ca.pem", folder / "ca.key"
        _openssl("req", "-x509", *_KEY, "-keyout", self._key, "-out", self.ca, "-days", _DAYS, "-subj", f"/CN={name}",
                 "-addext", "basicConstraints=critical,CA:TRUE")

    def issue(self, file: str, common_name: str = "", hosts: Sequence[str] = ("127.0.0.1", "localhost")) -> tuple[Path, Path]:
        """Makes a certificate and its key, and replaces files of that name.

        Args:
            file: Name of the two files, without ending.
            common_name: Of the subject; `file` if it is empty.
            hosts: IP addresses and names that it is valid for.

        Returns:
            The paths of certificate and key.
        """
        certificate, key, request = (self._folder / f"{file}.{ending}" for ending in ("pem", "key", "csr"))
        names = ",".join(f"IP:{host}" if host.replace(".", "").isdigit() or ":" in host else f"DNS:{host}" for host in hosts)
        extensions = self._folder / f"{file}.ext"
        extensions.write_text(f"subjectAltName={names}\nextendedKeyUsage=serverAuth,clientAuth\n")
        new_key, new = key.with_suffix(".key.new"), certificate.with_suffix(".pem.new")
        _openssl("req", "-new", *_KEY, "-keyout", new_key, "-out", request, "-subj", f"/CN={common_name or file}")
        _openssl("x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", _DAYS,
                 "-extfile", extensions, "-out", new)
        new_key.replace(key)
        new.replace(certificate)
        return certificate, key


def _openssl(*arguments: str | Path) -> None:
    try:
        done = subprocess.run(["openssl", *map(str, arguments)], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise LabError("The program openssl is not on this machine", todo="Install it (Debian: apt-get install openssl)") from error
    if done.returncode != 0:
        raise LabError(f"openssl {arguments[0]} failed: {done.stderr}")
