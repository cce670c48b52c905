"""What a client gives back while the door keeps deliveries back."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from broker_plugin import building, draining, frames, settling
from broker_plugin.channels import Channel
from broker_plugin.door import Door
from broker_plugin.relay import Relay


@pytest.mark.parametrize("kind", [frames.BASIC_RECOVER, frames.BASIC_RECOVER_ASYNC])
def test_what_the_door_kept_back_goes_back_with_a_recover(kind: int) -> None:
    """When the door gave up draining it gave it back once more, under numbers that the broker did not know: 406."""
    told: list[bytes] = []
    outbox = SimpleNamespace(put=lambda data, _sequence=0: told.append(data), total=0)
    channel = Channel(1)
    channel.undelivered, channel.unseen = [5, 6], [building.ack(1, 4)]
    relay = SimpleNamespace(outbox=outbox, ask=lambda _: None, give_back=lambda _: None, gives_back=lambda _: None, channels={1: channel})
    settling.recover(cast(Relay, relay), channel, kind, building.raw_method_frame(1, kind, b"\1")[7:-1])
    draining.give_up(cast(Door, SimpleNamespace(draining="", relays=[relay])))
    assert told == [building.raw_method_frame(1, frames.BASIC_RECOVER, b"\1")]
    assert not channel.unseen
