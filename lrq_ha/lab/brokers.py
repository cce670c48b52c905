"""RabbitMQ installations on this machine: the distribution's own, and those that `scripts/broker` unpacked into the cache.

Rules: nothing is installed or started here; a broker is found by its files on the disk, never by asking a running one. A version is named
by its series, `3.10` for 3.10.8.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lrq_ha.lab.errors import LabError

_APPLICATIONS = re.compile(r"\{(?:included_|optional_)?applications,\s*\[([^\]]*)\]")
_SERVER_GLOB = "usr/lib/rabbitmq/lib/rabbitmq_server-*/sbin/rabbitmq-server"


@dataclass(frozen=True)
class Installation:
    """One RabbitMQ that can be started.

    Attributes:
        version: Full version, as "4.3.6".
        sbin: Folder of the server's own scripts (not the distribution's wrappers, which insist on a user of their own).
        erlang_bin: Folder with the `erl` and `epmd` that this version runs on.
    """

    version: str
    sbin: Path
    erlang_bin: Path

    @property
    def series(self) -> str:
        """First two numbers of the version, as "4.3"."""
        return ".".join(self.version.split(".")[:2])

    def applications(self, plugins: Iterable[str] = ()) -> list[Path]:
        """Folders of the Erlang applications that a broker with these plugins needs, of those in its installation.

        Erlang looks for each module in every folder that it is given, so a broker that is given no others boots in two thirds of the time.

        Raises:
            LabError: A plugin did not come with it.
        """
        folder = self.sbin.parent / "plugins"
        here = {path.name.rpartition("-")[0]: path for path in folder.iterdir() if path.is_dir()}
        for name in plugins:
            if name not in here:
                raise LabError(f"RabbitMQ {self.version} in {folder} has no plugin {name}", todo="choose one of those that are there")
        needed: dict[str, Path] = {}
        todo = ["rabbit", *plugins]
        while todo:
            name = todo.pop()
            if name in here and name not in needed:
                needed[name] = here[name]
                for names in _APPLICATIONS.findall((here[name] / "ebin" / f"{name}.app").read_text()):
                    todo += re.findall(r"\w+", names)
        return sorted(needed.values())


def cache_directory() -> Path:
    """Where `scripts/broker` unpacks brokers: `$LRQ_BROKERS_DIR`, else below the user's cache folder."""
    if chosen := os.environ.get("LRQ_BROKERS_DIR"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lrq-ha" / "brokers"


def installations() -> dict[str, Installation]:
    """Every usable RabbitMQ by series; the distribution's own comes first, and wins over an unpacked one of its series."""
    found: dict[str, Installation] = {}
    erl = shutil.which("erl", path=f"{os.environ.get('PATH', os.defpath)}:/usr/bin")
    for installation in (*(_in(Path("/"), Path(erl).parent) if erl else ()), *_cached()):
        found.setdefault(installation.series, installation)
    return found


def find(series: str | None = None) -> Installation:
    """The installation of a series; without one, the distribution's, else any.

    Raises:
        LabError: It is not on this machine.
    """
    found = installations()
    wanted = series or next(iter(found), "")
    if wanted not in found:
        here = ", ".join(found) or "none"
        raise LabError(f"RabbitMQ {series or ''} is not on this machine (found: {here})".replace("  ", " "),
                       todo=f"Run scripts/setup --broker {series}" if series else "Run scripts/setup")
    return found[wanted]


def _cached() -> Iterator[Installation]:
    for root in sorted(cache_directory().glob("[0-9]*")):
        yield from _in(root, root / "bin")


def _in(root: Path, erlang_bin: Path) -> Iterator[Installation]:
    if (erlang_bin / "erl").exists() and (erlang_bin / "epmd").exists():
        for server in sorted(root.glob(_SERVER_GLOB)):
            yield Installation(server.parents[1].name.partition("-")[2], server.parent, erlang_bin)
