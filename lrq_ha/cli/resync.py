"""`lrq-ha resync`: a full sync of a client, for sites (asked of the source group) or from a source (asked of the sink group)."""

from __future__ import annotations

import argparse

from .commands import add_group, find_primary
from .list_nodes import add_command, tell


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    resync = add_command(
        subparsers,
        "resync",
        "bring a client's whole data to a site again",
        "Demands a full sync of CLIENT: at the source group for its sites, or at the sink group from a source. The client's provider sends a whole "
        "snapshot, while deltas go on. The demand is kept over failovers, and waits for a site that is away; with --from, also for a provider.",
        "examples:\n  lrq-ha resync orders --group east --to west --dry-run\n  lrq-ha resync orders --group west --from east --reason 'lost rows'",
    )
    resync.add_argument("client", metavar="CLIENT", help="the log replication client")
    which = resync.add_mutually_exclusive_group(required=True)
    which.add_argument("--to", nargs="+", default=[], metavar="SITE", help="at the source: the sites that get it")
    which.add_argument("--to-all", action="store_true", help="at the source: every site gets it")
    which.add_argument("--from", dest="source", metavar="SOURCE", help="at the sink: the source that sends it")
    add_group(resync)
    resync.add_argument("--reason", default="", metavar="TEXT", help="for the provider, the logs and `lrq-ha list`")
    resync.add_argument("--dry-run", action="store_true", help="only say what would happen")
    resync.set_defaults(run=_resync)


def _resync(args: argparse.Namespace) -> int:
    body = {
        "client": args.client,
        "sites": args.to,
        "to_all": args.to_all,
        "source": args.source,
        "reason": args.reason,
        "dry_run": args.dry_run,
    }
    print(tell(find_primary(args), "resync", body))
    return 0
