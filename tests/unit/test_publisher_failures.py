"""What a publisher or a confirm raises again and again does not grow."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

import pytest

from lrq_ha.errors import LrqError
from lrq_ha.publisher import AsyncPublisher
from lrq_ha.publisher.confirm import AsyncConfirm, BaseConfirm, Confirm
from lrq_ha.publisher.core import BasePublisher
from lrq_ha.publisher.errors import FencedError, NackedError


class Silent(BasePublisher[Confirm]):
    """A publisher that sends nothing."""

    def _begin(self) -> None:
        self._failure = FencedError("p", 2, 1)

    def _new_confirm(self, replication_id: str, explain: Callable[[], LrqError | None]) -> Confirm:
        raise NotImplementedError

    def publish(self) -> None:
        self._take(self._draft_publish("", "queue", b"body", None, False))


def depths(call: Callable[[], object]) -> tuple[int, int]:
    """How many frames, and causes, the first refusal has, and the last of a hundred, each wrapped by who meets it."""

    def refusal() -> LrqError:
        try:
            call()
        except LrqError as error:
            try:
                raise ValueError from error
            except ValueError:
                with pytest.raises(LrqError) as caught:
                    call()
                return caught.value
        raise AssertionError("it was not refused")

    counts = []
    for _ in range(100):
        each: BaseException | None = refusal()
        count = 0
        while each is not None:
            count += 1 + len(traceback.extract_tb(each.__traceback__))
            each = each.__context__
        counts.append(count)
    return counts[0], counts[-1]


@pytest.mark.parametrize("kind", ["publish", "connect", "confirm", "async confirm"])
def test_what_is_refused_again_does_not_grow(kind: str) -> None:
    """It is the same error each time: the frames of every raise, with the messages in them, were kept by it."""
    asynchronous = AsyncPublisher(["amqp://127.0.0.1:1"], "p")
    asyncio.run(asynchronous.close())
    confirms: dict[type[BaseConfirm], BaseConfirm] = {}
    for make in (Confirm, AsyncConfirm):
        confirms[make] = make("p/1", lambda: None)
        confirms[make].settle(NackedError("p/1", 0, ""))
    call: Callable[[], object] = {
        "publish": Silent(["amqp://127.0.0.1:1"], "p").publish,
        "connect": lambda: asyncio.run(asynchronous.connect()),
        "confirm": confirms[Confirm]._outcome,
        "async confirm": lambda: asyncio.run(confirms[AsyncConfirm].result()),  # type: ignore[attr-defined]
    }[kind]
    first, last = depths(call)
    assert last == first
