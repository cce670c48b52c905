"""A PostgreSQL server of a test's own, from the programs that the machine has; it listens on a socket in its own folder only."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPTIONS = "-c listen_addresses='' -c fsync=off -c max_connections=30"


def find_programs() -> Path | None:
    """The folder with initdb and pg_ctl."""
    found = shutil.which("pg_ctl")
    folders = [*([Path(found).parent] if found else []), *sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    return next((folder for folder in folders if (folder / "initdb").exists() and (folder / "pg_ctl").exists()), None)


def why_not() -> str:
    """Why no server can be started here; empty if one can."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        return f"psycopg is not installed, or finds no libpq ({error}): pip install 'psycopg[binary]'"
    if find_programs() is None:
        return "PostgreSQL is not on this machine: apt-get install postgresql"
    if os.geteuid() == 0 and shutil.which("runuser") is None:
        return "PostgreSQL does not run as root, and there is no runuser"
    return ""


class Server:
    """A server; `stop` and `start` are those of an operator, `kill` is a crash."""

    def __init__(self, folder: Path, programs: Path) -> None:
        self._programs, self._data, self._sockets = programs, folder / "data", folder
        self.dsn = f"host={folder} user=app dbname=postgres"

    def _call(self, *command: str) -> None:
        user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        said = subprocess.run([*user, str(self._programs / command[0]), *command[1:]], capture_output=True, text=True, cwd="/", timeout=60)
        assert said.returncode == 0, said.stdout + said.stderr

    def create(self) -> None:
        self._call("initdb", "-D", str(self._data), "-U", "app", "-A", "trust", "-N")

    def start(self) -> None:
        options = f"{OPTIONS} -k {self._sockets}"
        self._call("pg_ctl", "-D", str(self._data), "-w", "-l", str(self._sockets / "log"), "-o", options, "start")

    def create_database(self) -> str:
        """An empty database; returns the connection string."""
        import psycopg

        name = f"d{time.time_ns()}"
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.dsn.replace("dbname=postgres", f"dbname={name}")

    def kill(self) -> None:
        self._call("pg_ctl", "-D", str(self._data), "-m", "immediate", "stop")


@contextmanager
def server() -> Iterator[Server]:
    """A server that runs, in a folder that goes with it."""
    programs = find_programs()
    assert programs is not None
    with tempfile.TemporaryDirectory(prefix="lrq-pg-") as name:
        if os.geteuid() == 0:
            shutil.chown(name, "postgres")
        found = Server(Path(name), programs)
        found.create()
        found.start()
        try:
            yield found
        finally:
            found.kill()
