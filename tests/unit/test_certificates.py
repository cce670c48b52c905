"""When the certificates of a sidecar's listeners expire: of the one in use, whatever its file holds by now."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from broker_plugin.amqp.tls import TlsFiles, Verify, server_files
from lrq_ha.lab.certificates import Authority
from lrq_ha.sidecar.certificates import Expiries

DAY_S = 86_400.0


def issue(folder: Path, days: int, verify: Verify = "none") -> tuple[TlsFiles, str]:
    """A context whose certificate is for so many days from now on."""
    with pytest.MonkeyPatch.context() as patch:
        authority = Authority(folder)
        patch.setattr("lrq_ha.lab.certificates._DAYS", str(days))
        certificate, key = map(str, authority.issue("door"))
        ca = str(authority.ca) if verify != "none" else ""
        return server_files(certificate, key, ca, verify, "1.2"), certificate


@pytest.mark.parametrize("verify", ["none", "optional", "required"])
def test_the_time_of_a_certificate(verify: Verify, tmp_path: Path) -> None:
    expiries = Expiries({"door": issue(tmp_path, 20, verify)})
    for _ in range(2):
        assert expiries.read()["door"] - time.time() == pytest.approx(20 * DAY_S, abs=DAY_S / 24)


def test_one_that_has_expired_is_told_as_such(tmp_path: Path) -> None:
    assert Expiries({"door": issue(tmp_path, -1)}).read() == {"door": 0.0}


def test_the_certificate_in_use_counts(tmp_path: Path) -> None:
    files, certificate = issue(tmp_path, 20)
    expiries = Expiries({"door": (files, certificate)})
    before = expiries.read()["door"]
    issue(tmp_path, 40)
    assert expiries.read() == {"door": before}, "it is not used yet"
    assert Expiries({"door": (files, certificate)}).read() == {}, "the file has another one than the context"
    files.refresh()
    assert expiries.read()["door"] - before == pytest.approx(20 * DAY_S, abs=DAY_S / 24)
    Path(certificate).unlink()
    assert expiries.read()["door"] > before, "what is known stays, as the certificate is used"
