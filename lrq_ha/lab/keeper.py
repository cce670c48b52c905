"""The keeper: one small process that is the parent of every process of a lab, so that none outlives it.

Rules:

1. The keeper ends when its standard input does: the lab process holds the other end, so its death by any cause ends the lab.
2. It is a child subreaper: processes that a killed broker leaves behind become the keeper's children, and the end kills children until none is left.
3. Its own death takes its children with it (PR_SET_PDEATHSIG). That signal follows the *thread* that forked, which is why a lab used from
   several threads does not start processes itself.
4. It has its own session: Ctrl-C in a terminal reaches the lab process, which ends things in order.
5. It answers one JSON line per connection on a socket in the lab's folder, so another terminal can act on that lab. The folder is the
   user's alone. Only the standard library is used.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lrq_ha.lab.errors import LabError, NoLab

LAB_FILE = "lab.json"
SOCKET_FILE = "keeper.sock"
#: A keeper that is gone refuses at once; one that does not answer has a process to start or to reap on a machine with a busy disk.
_ANSWER_TIMEOUT_S = 120.0
#: A client sends its request at once, unless the machine stands still.
_REQUEST_TIMEOUT_S = 20.0
_REQUEST_BYTES_MAX = 1 << 20
#: A higher limit would only cost: the Erlang helpers close every possible descriptor when they start, and containers often allow a billion.
_OPEN_FILES_MAX = 65_536
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


@contextmanager
def _address(directory: Path) -> Iterator[str]:
    # A path by way of an open folder: socket paths have 108 bytes at most, folders of tests are longer.
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET_FILE}"
    finally:
        os.close(folder)


def ask(directory: Path, **request: Any) -> dict[str, Any]:
    """Sends one request to the keeper of the lab in `directory` and returns its answer.

    Raises:
        NoLab: No lab runs there.
        LabError: The keeper refused, or does not answer.
    """
    try:
        with _address(directory) as address, socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_ANSWER_TIMEOUT_S)
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            answer: dict[str, Any] = json.loads(connection.makefile("rb").readline())
    except TimeoutError as error:
        raise LabError(f"The lab in {directory} has not answered within {_ANSWER_TIMEOUT_S:g} s", retriable=True) from error
    except (OSError, ValueError) as error:
        raise NoLab(f"No lab runs in {directory}", todo="Start one with `lrq-ha lab up`, or name its folder with --dir") from error
    if "error" in answer:
        raise LabError(answer["error"])
    return answer


class _Keeper:
    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._specs: dict[str, dict[str, Any]] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def serve(self) -> None:
        with _address(self._directory) as address, socket.socket(socket.AF_UNIX) as listener, selectors.DefaultSelector() as selector:
            listener.bind(address)
            listener.listen()
            selector.register(listener, selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            print("listening", flush=True)
            while True:
                for key, _ in selector.select(timeout=1.0):
                    if key.fileobj is sys.stdin:
                        return
                    connection, _ = listener.accept()
                    with connection:
                        if self._answer(connection):
                            return
                self._reap()

    def _answer(self, connection: socket.socket) -> bool:
        """Serves one connection; True if the lab is to end. An error affects only the client of that connection."""
        connection.settimeout(_REQUEST_TIMEOUT_S)
        try:
            request = json.loads(connection.makefile("rb").readline(_REQUEST_BYTES_MAX))
            do = request.pop("do")
            if do == "end":
                self.end()
            handlers: dict[str, Callable[..., dict[str, Any]]] = {
                "list": self._list, "spec": self._spec, "spawn": self._spawn, "signal": self._signal, "end": self._list}
            answer = handlers[do](**request)
            connection.sendall(json.dumps(answer).encode() + b"\n")
            return bool(do == "end")
        except (OSError, ValueError, KeyError, TypeError) as error:
            try:
                connection.sendall(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
            except OSError:
                pass
            return False

    def _list(self) -> dict[str, Any]:
        return {key: {"pid": process.pid, "exit": process.poll()} for key, process in self._processes.items()}

    def _spec(self, key: str) -> dict[str, Any]:
        """The start parameters of `key`."""
        return self._specs[key]

    def _spawn(self, key: str, **spec: Any) -> dict[str, Any]:
        """Starts `key`; without argv, as at its first start."""
        if key in self._processes and self._processes[key].poll() is None:
            raise ValueError(f"{key} is running (pid {self._processes[key].pid})")
        spec = self._specs[key] = spec or self._specs[key]
        with open(spec["log"], "ab") as log:
            self._processes[key] = subprocess.Popen(
                spec["argv"], env=spec["env"], cwd=spec["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=_prepare_child)
        return {"pid": self._processes[key].pid}

    def _signal(self, key: str, number: int) -> dict[str, Any]:
        if self._processes[key].poll() is not None:
            raise ValueError(f"{key} is not running")
        # The session: a broker's helper processes go with it.
        os.killpg(self._processes[key].pid, number)
        if number == signal.SIGKILL:
            self._processes[key].wait()
        elif number == signal.SIGSTOP:  # on a busy machine its threads take a moment
            os.waitid(os.P_PID, self._processes[key].pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        return {}

    def _reap(self) -> None:
        """Collects adopted orphans, but leaves the known processes to their own `Popen`."""
        known = {process.pid: process for process in self._processes.values()}
        try:
            while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                if ended.si_pid in known:
                    known[ended.si_pid].poll()
                else:
                    os.waitpid(ended.si_pid, 0)
        except ChildProcessError:
            pass

    def end(self) -> None:
        """Kills every descendant: killing a parent makes its children ours, hence the loop."""
        while children := _children():
            for pid in children:
                os.kill(pid, signal.SIGKILL)
            for pid in children:
                try:
                    os.waitpid(pid, 0)
                except ChildProcessError:
                    pass
        for process in self._processes.values():
            process.poll()
        for name in (LAB_FILE, SOCKET_FILE):
            (self._directory / name).unlink(missing_ok=True)


def _children() -> list[int]:
    """Process ids of the direct children, zombies included. They are not reused before a wait for them."""
    mine = os.getpid()
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # "pid (name) state ppid …"; a name may hold spaces and brackets.
            if int(stat.read_text().rpartition(")")[2].split()[1]) == mine:
                children.append(int(stat.parent.name))
        except OSError:
            continue
    return children


def end_with_parent() -> None:
    """For a child process, before it begins: it is killed when the thread that forked it ends, by whatever cause."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _prepare_child() -> None:
    end_with_parent()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    limit = _OPEN_FILES_MAX if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES_MAX)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def main() -> None:
    """Runs the keeper of the lab in the folder that is the only argument."""
    if _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1) != 0:
        print("keeper: cannot become a subreaper; a killed lab may leave helper processes", file=sys.stderr)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    keeper = _Keeper(Path(sys.argv[1]))
    try:
        keeper.serve()
    finally:
        keeper.end()


def start(directory: Path, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Starts the keeper of the lab in `directory`; it ends when the returned process's stdin is closed.

    Raises:
        LabError: It did not come up.
    """
    with open(directory / "keeper.log", "ab") as log:
        process = subprocess.Popen([sys.executable, "-m", "lrq_ha.lab.keeper", str(directory)], env=environment, stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=log, start_new_session=True)
    if process.stdout is None or process.stdout.readline() != b"listening\n":
        process.kill()
        raise LabError(f"The lab's keeper did not start in {directory}", todo=f"See {directory / 'keeper.log'}")
    return process


def wait_gone(directory: Path, timeout_s: float) -> bool:
    """Waits until no keeper answers in `directory`; False if one still does after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            ask(directory, do="list")
        except NoLab:
            return True
        time.sleep(0.05)
    return False


if __name__ == "__main__":
    main()
