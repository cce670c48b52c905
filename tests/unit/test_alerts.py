"""The alerts for Prometheus: each fires where it should and nowhere else, and names steps that are documented.

`python tests/unit/test_alerts.py` writes their table in docs/operations/monitoring.md.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from prometheus import run_promtool
from test_docs import anchors

from lrq_ha.sidecar.http.metrics import FAMILIES

ROOT = Path(__file__).parents[2]
FILE = ROOT / "docs" / "operations" / "monitoring" / "alerts.yml"
PAGE = ROOT / "docs" / "operations" / "monitoring.md"
RULES: dict[str, dict[str, Any]] = {rule["alert"]: rule for rule in yaml.safe_load(FILE.read_text("utf-8"))["groups"][0]["rules"]}
MiB = 1 << 20


class Case(NamedTuple):
    """Series with which an alert fires at a time, with these labels, and series with which it is quiet.

    Values are in promtool's notation, four a minute: "0x8" is nine times 0, "0+1x8" grows by 1.
    """

    at: str
    firing: dict[str, str]
    quiet: dict[str, str]
    labels: dict[str, str]


def of(metric: str, values: str, node: str = "e1", **labels: str) -> dict[str, str]:
    shown = ",".join(f'{name}="{value}"' for name, value in {"group": "east", "node": node, **labels}.items())
    return {f"{metric}{{{shown}}}": values}


GROUP = {"group": "east"}
NODE = {**GROUP, "node": "e1"}
PEER = {**NODE, "peer": "e2"}
SITE = {**NODE, "site": "west", "client": "orders"}
TARGET = 'up{job="lrq-ha",instance="e1"}'
LOG = of("lrq_log_max_bytes", f"{100 * MiB}x80")
CASES = {
    "LrqNoPrimary": Case(
        "2m",
        of("lrq_node_primary", "1 1 0x20") | of("lrq_node_primary", "0x20", "e2"),
        of("lrq_node_primary", "1 1 0x20") | of("lrq_node_primary", "0 0 1x20", "e2"),
        GROUP,
    ),
    "LrqSeveralPrimaries": Case(
        "2m",
        of("lrq_node_primary", "1x20") | of("lrq_node_primary", "1x20", "e2"),
        of("lrq_node_primary", "1x20") | of("lrq_node_primary", "0x20", "e2"),
        GROUP,
    ),
    "LrqNodeDown": Case("2m", {TARGET: "0x20"}, {TARGET: "1x20"}, {"job": "lrq-ha", "instance": "e1"}),
    "LrqBrokerDown": Case("2m", of("lrq_broker_up", "0x20"), of("lrq_broker_up", "1 0 1x20"), NODE),
    "LrqFlaps": Case(
        "10m",
        of("lrq_incarnations_total", "0+1x60", reason="ended"),
        of("lrq_incarnations_total", "0+1x60", reason="refused") | of("lrq_incarnations_total", "1x60", reason="ended"),
        {**NODE, "reason": "ended"},
    ),
    "LrqNotRedundant": Case(
        "3m",
        of("lrq_in_sync_nodes", "1x20") | of("lrq_configured_nodes", "2x20"),
        of("lrq_in_sync_nodes", "1x20") | of("lrq_configured_nodes", "1x20"),
        GROUP,
    ),
    "LrqConfirmsStall": Case(
        "3m",
        of("lrq_unsafe_bytes", "900x20") | of("lrq_log_safe_sequence", "7x20") | of("lrq_node_primary", "1x20"),
        of("lrq_unsafe_bytes", "900x20") | of("lrq_log_safe_sequence", "7+1x20") | of("lrq_node_primary", "1x20"),
        NODE,
    ),
    "LrqLag": Case("3m", of("lrq_peer_lag_seconds", "6x20", peer="e2"), of("lrq_peer_lag_seconds", "4x20", peer="e2"), PEER),
    "LrqLogLeftLow": Case(
        "16m",
        LOG | of("lrq_peer_log_left_bytes", f"{49 * MiB}x80", peer="e2"),
        LOG | of("lrq_peer_log_left_bytes", f"{51 * MiB}x80", peer="e2"),
        PEER,
    ),
    "LrqDiverged": Case(
        "1m", of("lrq_node_role", "1x20", role="diverged"), of("lrq_node_role", "0x20", role="diverged"), {**NODE, "role": "diverged"}
    ),
    "LrqBrokerAlarm": Case("1m", of("lrq_broker_alarm", "1x20"), of("lrq_broker_alarm", "0x20"), NODE),
    "LrqBrokerLacks": Case("2m", of("lrq_broker_lacks", "1x20"), of("lrq_broker_lacks", "0x20"), NODE),
    "LrqRefusedAfterConfirm": Case(
        "4m", of("lrq_messages_refused_after_confirm_total", "0x8 1x20"), of("lrq_messages_refused_after_confirm_total", "5x20"), NODE
    ),
    "LrqFailoverHappened": Case(
        "5m",
        of("lrq_node_epoch", "257x8 514x20") | of("lrq_node_primary", "0x8 1x20"),
        of("lrq_node_epoch", "257x8 514x20") | of("lrq_node_primary", "0x30"),
        NODE,
    ),
    "LrqManyPromotions": Case(
        "20m",
        of("lrq_promotions_total", "0 0 1x20 2x20 3x60") | of("lrq_promotions_total", "0 0 1x20 2x80", "e2"),
        of("lrq_promotions_total", "0 0 1x80") | of("lrq_promotions_total", "0x20 1x80", "e2"),
        GROUP,
    ),
    "LrqPausedLong": Case("70m", of("lrq_paused", "1x300"), of("lrq_paused", "1x200 0x100"), NODE),
    "LrqCoordinationLost": Case("2m", of("lrq_coordination_up", "1 1 0x20"), of("lrq_coordination_up", "1 0 1x20"), NODE),
    "LrqDefinitionsDown": Case("6m", of("lrq_definitions_up", "0x40"), of("lrq_definitions_up", "1x40"), NODE),
    "LrqDefinitionsDiffer": Case("12m", of("lrq_definitions_differing_objects", "2x60"), of("lrq_definitions_differing_objects", "0x60"), NODE),
    "LrqSiteDown": Case("7m", of("lrq_site_connected", "0x40", site="west"), of("lrq_site_connected", "1x40", site="west"), {**NODE, "site": "west"}),
    "LrqSiteBehind": Case(
        "7m",
        of("lrq_site_lag_seconds", "61x40", site="west", client="orders"),
        of("lrq_site_lag_seconds", "59x40", site="west", client="orders"),
        SITE,
    ),
    "LrqSiteLogLeftLow": Case(
        "3m",
        LOG | of("lrq_site_log_left_bytes", f"{49 * MiB}x40", site="west", client="orders"),
        LOG | of("lrq_site_log_left_bytes", f"{51 * MiB}x40", site="west", client="orders"),
        SITE,
    ),
    "LrqCertificateExpiry": Case(  # the time begins at 0
        "1h",
        of("lrq_tls_certificate_expiry_timestamp_seconds", f"{14 * 86_400 + 3_599}x300", listener="door"),
        of("lrq_tls_certificate_expiry_timestamp_seconds", f"{14 * 86_400 + 3_600}x300", listener="door"),
        {**NODE, "listener": "door"},
    ),
    "LrqVersionSkew": Case(
        "25h",
        of("lrq_identity_info", "1x6100", version="0.1") | of("lrq_identity_info", "1x6100", "e2", version="0.2"),
        of("lrq_identity_info", "1x6100", version="0.1") | of("lrq_identity_info", "1x6100", "e2", version="0.1"),
        GROUP,
    ),
}


def test_every_alert_has_a_case() -> None:
    assert list(CASES) == list(RULES)


@pytest.mark.parametrize("name", RULES)
def test_an_alert_names_metrics_that_there_are_and_documented_steps(name: str) -> None:
    rule = RULES[name]
    known = {family.name for family in FAMILIES}
    used = set(re.findall(r"\blrq_\w+", rule["expr"]))
    assert used <= known
    assert used or "up{" in rule["expr"]
    path, _, anchor = rule["annotations"]["runbook"].partition("#")
    assert anchor in anchors((ROOT / path).read_text("utf-8"))
    assert rule["labels"]["severity"] in ("critical", "warning", "info")


def documented() -> str:
    """The table of docs/operations/monitoring.md."""
    rows = [
        f"| `{name}` | {rule['labels']['severity']} | [{rule['annotations']['summary'].removesuffix('.')}]"
        f"({link(rule['annotations']['runbook'])}) |"
        for name, rule in RULES.items()
    ]
    return "\n".join(["| alert | severity | when, and the steps |", "|---|---|---|", *rows]) + "\n"


def link(runbook: str) -> str:
    path, _, anchor = runbook.removeprefix("docs/operations/").partition("#")
    return f"#{anchor}" if path == PAGE.name else f"{path}#{anchor}"


def test_the_table_in_the_documentation() -> None:
    assert documented() in PAGE.read_text("utf-8"), "run: python tests/unit/test_alerts.py"


@pytest.mark.full
def test_promtool_takes_the_rules() -> None:
    code, said = run_promtool("check", "rules", FILE)
    assert code == 0, said
    assert f"SUCCESS: {len(RULES)} rules found" in said


@pytest.mark.full
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "quiet"])
@pytest.mark.parametrize("name", CASES)
def test_an_alert_fires_where_it_should(name: str, fires: bool, tmp_path: Path) -> None:
    case, rule = CASES[name], RULES[name]
    expected = {"exp_labels": {**case.labels, "severity": rule["labels"]["severity"]}, "exp_annotations": rule["annotations"]}
    test = {
        "interval": "15s",
        "input_series": [{"series": series, "values": values} for series, values in (case.firing if fires else case.quiet).items()],
        "alert_rule_test": [{"eval_time": case.at, "alertname": name, "exp_alerts": [expected] if fires else []}],
    }
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(FILE)], "evaluation_interval": "15s", "tests": [test]}))
    code, said = run_promtool("test", "rules", file)
    assert code == 0, said


@pytest.mark.full
def test_no_alert_for_a_group_without_any_sidecar_is_missed(tmp_path: Path) -> None:
    """Where no target gives lrq_node_primary, no expression over it has a value."""
    test = {"interval": "15s", "input_series": [], "alert_rule_test": [
        {"eval_time": "2m", "alertname": "LrqNoPrimary",
         "exp_alerts": [{"exp_labels": {"severity": "critical"}, "exp_annotations": RULES["LrqNoPrimary"]["annotations"]}]}]}  # fmt: skip
    file = tmp_path / "test.yml"
    file.write_text(json.dumps({"rule_files": [str(FILE)], "evaluation_interval": "15s", "tests": [test]}))
    code, said = run_promtool("test", "rules", file)
    assert code == 0, said


if __name__ == "__main__":
    text = PAGE.read_text("utf-8")
    PAGE.write_text(re.sub(r"\| alert \| severity .*?\n\n", lambda _: documented() + "\n", text, flags=re.DOTALL))
