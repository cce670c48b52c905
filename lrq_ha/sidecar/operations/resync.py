"""An operator's demand for full syncs: at the source group, of a client for its sites; at the sink group, of a client from a source.

Rule: a demand is an entry of the log, at a source a full sync request. So it outlives this primary, and waits for a site that is away. A source
refuses it without a provider, as the next provider takes no requests from before it; a sink's demand waits for a provider.
"""

from __future__ import annotations

from broker_plugin.log.replica import Replica
from lrq_ha.errors import LrqError
from lrq_ha.routing.chain import START
from lrq_ha.routing.names import parse_recv_queue, recv_queue

from ..sites.sessions import Sites


class FullSyncOrders:
    """Carries out demands for full syncs.

    Args:
        name: Of this node.
        replica: Its log.
        sites: Its sessions with other sites.
    """

    def __init__(self, name: str, replica: Replica, sites: Sites) -> None:
        self._name = name
        self._replica = replica
        self._sites = sites

    def resync(self, client: str, sites: list[str], to_all: bool, source: str | None, reason: str, dry_run: bool) -> tuple[bool, str]:
        """Demands full syncs of `client`: for these sites, for all, or from a source. Exactly one of the three is given.

        Raises:
            LrqError: The client, a site or the source is not known here, or the client has no provider.
        """
        if bool(sites) + to_all + (source is not None) != 1:
            return False, "name either sites, all of them, or a source"
        if not self._replica.active:
            return False, f"{self._name} is not primary: its group's primary has to be asked"
        if source is not None:
            return True, self._from_source(client, source, reason, dry_run)
        return True, self._to_sites(client, self._sites.remote_ids if to_all else sites, reason, dry_run)

    def _to_sites(self, client: str, sites: list[str], reason: str, dry_run: bool) -> str:
        self._sites.check_demand(client, sites)
        listed = ", ".join(sites) or "no site"
        if dry_run:
            return f"would ask {client} for a full sync for {listed}"
        self._sites.demand(client, sites, reason)
        return f"{client} is asked for a full sync for {listed}; a site that is away gets it later"

    def _from_source(self, client: str, source: str, reason: str, dry_run: bool) -> str:
        queue = recv_queue(client, source)
        state = self._replica.index.sink.newest(queue)
        if state.last == START:
            found = [parts for each in self._replica.index.sink.queues() if (parts := parse_recv_queue(each))]
            named = ", ".join(f"{parts.client_name} from {parts.remote_id}" for parts in found) or "none"
            raise LrqError(f"nothing of {client} has come from {source}", todo=f"Name a client and a source that are known here: {named}")
        last = f"the last whole snapshot took {state.snapshot_bytes} bytes" if state.whole != START else "no snapshot has been whole yet"
        if state.demand:
            return f"a full sync of {client} is demanded from {source} already ({state.demand_reason or 'no reason given'}); {last}"
        if dry_run:
            return f"would demand a full sync of {client} from {source}; {last}"
        self._replica.demand(queue, reason)
        return f"a full sync of {client} is demanded from {source}; {last}"
