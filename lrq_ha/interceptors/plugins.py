"""Finds, makes and keeps the interceptors that the configuration names.

Rule: only interceptors that the configuration names are imported. An installed package must not see messages, or run code in the sidecar, by its
installation alone: its name in the configuration is the operator's consent.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lrq_ha.errors import LrqError, place

from .events import Event, Point, Routing
from .hanging import Alarm
from .runner import Runner

log = logging.getLogger("lrq_ha.interceptors")

GROUP = "lrq_ha.interceptors"
#: Interceptors that come with lrq-ha, also in a checkout.
BUILT_IN = {"audit": "lrq_ha.interceptors.audit:Audit"}


class Settings(BaseModel):
    """The settings of one interceptor: the table [interceptors.NAME] of the configuration."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    priority: int | None = Field(None, description="lower ones are asked first; by default what the interceptor itself says, else 100")
    on_overflow: Literal["drop", "wait"] = Field(
        "drop", description='when it is too slow: "drop" events, counted and told; or let clients "wait", so that it is told everything'
    )
    buffer_bytes_max: int = Field(32 << 20, ge=1 << 10, description="events that wait for it; beside its headers, an event counts as 1 KiB")
    errors_max: int = Field(20, ge=1, description="so many failures in a row of one method switch it off")
    wait_max_s: float = Field(10.0, gt=0, description='with "wait": when it finishes nothing for so long, it is switched off')
    options: dict[str, Any] = Field(default={}, description="its own options")


def _offered() -> dict[str, list[EntryPoint | str]]:
    found: dict[str, list[EntryPoint | str]] = {name: [target] for name, target in BUILT_IN.items()}
    for entry in entry_points(group=GROUP):
        known = found.setdefault(entry.name, [])
        if not any(isinstance(other, EntryPoint) and (other.value, other.dist and other.dist.name) == (entry.value, entry.dist and entry.dist.name)
                   for other in known):  # one distribution may be found twice, by two entries of sys.path
            known.append(entry)
    return found


def _origin(offer: EntryPoint | str) -> str:
    return "lrq-ha itself" if isinstance(offer, str) else offer.dist.name if offer.dist is not None else offer.value


def make(name: str, settings: Settings) -> Runner:
    """Imports and makes one interceptor; it is not started.

    Raises:
        LrqError: No interceptor of that name is installed, or more than one; it cannot be imported; it refuses these options.
    """
    where = f"interceptors.{name}"
    offered = _offered()
    offers = offered.get(name, [])
    if not offers:
        raise LrqError(
            f"{where}: no interceptor of this name is installed; there are: {', '.join(sorted(offered))}",
            todo=f"Install a package with that entry point in the group {GROUP}, for the Python that runs the sidecar",
        )
    if len(offers) > 1:
        raise LrqError(f"{where}: more than one has this name: that of {' and that of '.join(sorted(map(_origin, offers)))}", todo="Uninstall one")
    offer = offers[0]
    try:
        if isinstance(offer, str):
            module, _, attribute = offer.partition(":")
            factory: Callable[..., Any] = getattr(importlib.import_module(module), attribute)
        else:
            factory = offer.load()
    except Exception as error:
        raise LrqError(f"{where}: it cannot be imported: {place(error)}: {error}") from error
    try:
        interceptor = factory(**settings.options)
    except (TypeError, ValueError, LrqError) as error:
        raise LrqError(f"{where}.options: {error}") from error
    except Exception as error:
        raise LrqError(f"{where}: it cannot be made: {place(error)}") from error
    priority = settings.priority if settings.priority is not None else getattr(interceptor, "priority", 100)
    if type(priority) is not int:
        raise LrqError(f"{where}: its priority is no whole number", todo=f"Set {where}.priority")
    runner = Runner(
        name,
        interceptor,
        priority=priority,
        on_overflow=settings.on_overflow,
        buffer_bytes_max=settings.buffer_bytes_max,
        errors_max=settings.errors_max,
        wait_max_s=settings.wait_max_s,
    )
    if not runner.points:
        raise LrqError(f"{where}: it has none of the methods {', '.join(point.value for point in Point)}")
    return runner


class Interceptors:
    """All interceptors of a sidecar, in the order of their priorities; equal ones by name.

    Args:
        tables: Settings by name.

    Attributes:
        points: The points that any of them has.
    """

    def __init__(self, tables: Mapping[str, Settings]) -> None:
        self._runners = sorted((make(name, settings) for name, settings in tables.items()), key=lambda runner: (runner.priority, runner.name))
        self.points = frozenset[Point]().union(*(runner.points for runner in self._runners))
        self._asked = [runner for runner in self._runners if runner.refuses and Point.ROUTING in runner.points]
        self._told = {
            point: [r for r in self._runners if point in r.points and not (point is Point.ROUTING and r.refuses)] for point in self.points
        }
        self._alarm = Alarm(self._end_what_hangs)

    def __bool__(self) -> bool:
        return bool(self._runners)

    @property
    def refuse(self) -> bool:
        """Whether any of them may refuse a publish."""
        return bool(self._asked)

    @property
    def full(self) -> bool:
        """Whether clients must wait for one of them."""
        return any(runner.full for runner in self._runners)

    def start(self, on_room: Callable[[], None]) -> None:
        """Starts them all. `on_room`: called from any thread when clients need not wait any more. Raises LrqError if one does not start."""
        for runner in self._runners:
            runner.on_room = on_room
            try:
                runner.start()
            except Exception as error:
                self.close()
                raise LrqError(f"interceptors.{runner.name} does not start: {error}") from error
            kinds = "may refuse publishes; " if runner.refuses else ""
            log.info("interceptor %s: %spriority %d", runner.name, kinds, runner.priority)
        if self._asked:
            self._alarm.start()

    def _end_what_hangs(self) -> None:
        for runner in self._asked:
            runner.end_what_hangs()

    def ask(self, event: Routing) -> tuple[str, str] | None:
        """`routing`: the name of the first that refuses this publish, and its reason; None if none does."""
        for runner in self._asked:
            reason = runner.ask(event)
            if reason is not None:
                return runner.name, reason
        return None

    def tell(self, point: Point, event: Event) -> None:
        """Passes an event to the interceptors with that point."""
        for runner in self._told.get(point, ()):
            runner.put(point, event)

    def check(self) -> None:
        """Once a second."""
        for runner in self._runners:
            runner.check()

    def reload(self) -> None:
        """SIGHUP."""
        for runner in self._runners:
            runner.reload()

    def end_asking(self) -> None:
        """No interceptor is asked any more. To be called in the thread of `start`, before `close`."""
        self._alarm.stop()

    def close(self) -> None:
        """Ends them all; blocks until they have received all earlier events, for some seconds each at most."""
        for runner in self._runners:
            runner.close()

    def status(self) -> dict[str, Any]:
        """Their part of GET /status, by name."""
        return {runner.name: runner.status() for runner in self._runners}
