"""A pytest plugin for the suites' own virtualenv: one JSON line per test, as soon as it is over, into the file `$OUTCOMES`.

Rules: a test's outcome is the worst of its phases; of the text only the last line is kept, which names the error.
"""

import json
import os

_WORSE = ("passed", "skipped", "failed")
_worst = {}


def pytest_runtest_logreport(report):
    before, text = _worst.get(report.nodeid, ("passed", ""))
    if _WORSE.index(report.outcome) > _WORSE.index(before):
        before, text = report.outcome, report.longreprtext.strip().rpartition("\n")[2]
    _worst[report.nodeid] = before, text
    if report.when == "teardown":
        with open(os.environ["OUTCOMES"], "a") as file:
            file.write(json.dumps([report.nodeid, before, text]) + "\n")
        del _worst[report.nodeid]
