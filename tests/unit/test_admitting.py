"""Who may come in when there is no room: what is counted as what, and who makes room."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from broker_plugin.door.admission import KEPT_EACH, Admission, AdmissionControl, Kind


class Comers:
    """Connections by name; those that were ended, in order."""

    def __init__(self, connections_max: int, others: int = 0) -> None:
        self.admissions = AdmissionControl(connections_max, others)
        self.ended: list[str] = []

    def come(self, name: str, host: str = "h") -> Admission | None:
        return self.admissions.come(host, self._end(name))

    def _end(self, name: str) -> Callable[[], None]:
        return lambda: self.ended.append(name)

    def clients(self, count: int) -> list[Admission]:
        """So many log in, one after the other."""
        found = []
        for n in range(count):
            arrival = self.come(f"client-{n}")
            assert arrival is not None
            assert self.admissions.has_room_for_client
            self.admissions.logged_in(arrival, Kind.CLIENT)
            found.append(arrival)
        return found


def test_a_login_that_is_not_finished_makes_room() -> None:
    """The oldest one of the address that has most of them; never a connection that has logged in."""
    comers = Comers(5)
    comers.clients(1)
    for name, host in (("a", "one"), ("b", "many"), ("c", "many"), ("d", "many"), ("e", "other"), ("f", "another")):
        assert comers.come(name, host) is not None
        assert comers.admissions.open <= 5
    assert comers.ended == ["b", "c"]


def test_without_such_a_login_more_are_turned_away() -> None:
    comers = Comers(5)
    clients = comers.clients(5)
    assert comers.come("late") is None
    assert not comers.admissions.has_room_for_client
    comers.admissions.gone(clients[0])
    comers.admissions.gone(clients[0])  # it is told once more when its socket has closed
    assert comers.admissions.open == 4
    assert comers.admissions.has_room_for_client
    late = comers.come("late")
    assert late is not None
    assert comers.come("later") is not None
    comers.admissions.logged_in(late, Kind.CLIENT)  # its last word was on its way when it was ended
    assert comers.ended == ["late"]
    assert late.kind is Kind.GONE
    assert comers.admissions.has_room_for_client


@pytest.mark.parametrize(("connections_max", "others", "clients_max"), [(10_000, 3, 9_500), (40, 2, 32), (40, 0, 38), (10, 7, 5), (1, 1, 1)])
def test_clients_leave_room_for_nodes_and_sites(connections_max: int, others: int, clients_max: int) -> None:
    comers = Comers(connections_max, others)
    comers.clients(clients_max)
    assert not comers.admissions.has_room_for_client
    for n in range(min(KEPT_EACH * others, connections_max - clients_max)):
        node = comers.come(f"node-{n}", "peer")
        assert node is not None
        comers.admissions.logged_in(node, Kind.OTHER)
    assert comers.ended == []


def test_logins_behind_a_load_balancer_count_at_their_own_addresses() -> None:
    """All would count as one host's, and the others' logins would make room for those of one client."""
    comers = Comers(4)
    for name, host in (("a", "one"), ("b", "many"), ("c", "many"), ("d", "other")):
        arrival = comers.come(name, "balancer")
        assert arrival is not None
        comers.admissions.moved(arrival, host)
    late = comers.come("e", "balancer")
    assert late is not None
    assert comers.ended == ["b"]
    comers.admissions.logged_in(late, Kind.CLIENT)
    comers.admissions.moved(late, "one")  # by a node that relays it, after its login had made room
    assert comers.admissions.open == 4
