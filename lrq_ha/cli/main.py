"""`lrq-ha`: the one command.

Rules: results go to stdout, everything else to stderr; a failure is one line that names the remedy. Every subcommand's module has
`add_parser(subparsers)`, which sets `run`, a function from the parsed arguments to the exit code.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from lrq_ha import __version__, demo
from lrq_ha.cli import (
    adopt,
    check_group,
    commands,
    configure,
    coordination,
    definitions,
    describe_group,
    edit_config,
    history,
    lab,
    list_nodes,
    peek,
    reinit,
    republish,
    resync,
    sidecar,
)
from lrq_ha.cli.doctor import command as doctor
from lrq_ha.errors import LrqError
from lrq_ha.overview.text import one_line

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130
#: Errors of a print if the disk is full, or the reader has gone.
UNWRITABLE = frozenset({errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})

_EPILOG = """\
examples:
  lrq-ha lab up                                  start a playground: brokers and sidecars on free loopback ports
  lrq-ha lab ctl e1 list_queues                  run rabbitmqctl on the broker of its node e1
  lrq-ha list --watch                            look at its nodes (found in .lab/lab.json)
  lrq-ha doctor --config /etc/lrq-ha/e1.toml     is this node, its broker and its group set up as they have to be?
  lrq-ha list --config /etc/lrq-ha/e1.toml       look at the group of a configured node
  lrq-ha sidecar --config /etc/lrq-ha/e1.toml    run one node's sidecar in the foreground
  lrq-ha promote e2 --down e1                    e1 is down for good: make e2 the primary
  lrq-ha switchover                              hand over to the backup, in order: nothing lost, nothing twice

exit codes:
  0 done; 1 refused or failed (stderr says why and what to do); 2 wrong arguments; 130 interrupted with Ctrl-C;
  doctor and check have codes of their own: see their --help
"""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="lrq-ha",
        description="HA pairs and multi-site log replication for RabbitMQ. A sidecar runs beside each broker; clients connect to the sidecar.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action="version", version=f"lrq-ha {__version__}")
    subparsers = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    sidecar.add_parser(subparsers)
    list_nodes.add_parser(subparsers)
    describe_group.add_parser(subparsers)
    check_group.add_parser(subparsers)
    commands.add_parser(subparsers)
    peek.add_parser(subparsers)
    reinit.add_parser(subparsers)
    resync.add_parser(subparsers)
    republish.add_parser(subparsers)
    adopt.add_parser(subparsers)
    definitions.add_parser(subparsers)
    coordination.add_parser(subparsers)
    doctor.add_parser(subparsers)
    history.add_parser(subparsers)
    lab.add_parser(subparsers)
    demo.add_parser(subparsers)
    configure.add_parser(subparsers, parser)
    edit_config.add_parser(subparsers)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; wrong arguments exit with 2 at once."""
    try:
        args = parser().parse_args(argv)
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except LrqError as error:
        print(f"lrq-ha: {one_line(sidecar.redact(' '.join(str(error).splitlines())))}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        if error.errno not in UNWRITABLE or error.filename is not None:
            raise
        # Nothing more goes to stdout, not even when Python flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if error.errno != errno.EPIPE:  # the reader has gone (`lrq-ha list --watch | head`), and wants no message
            print(f"lrq-ha: standard output cannot be written: {error.strerror}", file=sys.stderr)
        return EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
