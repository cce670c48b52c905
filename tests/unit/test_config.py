"""The configuration: every error names the key, the value and what is allowed; the documented sample is the model's.

`python tests/unit/test_config.py` writes the sample in docs/configuration.md anew.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import tomllib
from pathlib import Path

import pytest
from node_config import MINIMAL

from broker_plugin.amqp import tls
from lrq_ha.lab.certificates import Authority
from lrq_ha.sidecar import config as configuration
from lrq_ha.sidecar.config import ConfigError, exposed, load, sample

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"
_BLOCK = re.compile(r"(?<=```toml\n).*?(?=```)", re.DOTALL)

LEVELS = "[replication]\nreplicate = { '%s' = \"%s\" }\n[http]"
ETCD = '[replication]\ncoordination = "{static}"\n[coordination]\nendpoints = ["http://h:2379"]\n{more}\n[http]'
PEER = '[[peers]]\nname = "{name}"\nid = {id}\ndoor = "amqp://lrq:secret@127.0.0.1:5683"\nhttp = "http://127.0.0.1:8081"\n'


def write(folder: Path, text: str) -> Path:
    file = folder / "node.toml"
    file.write_text(text)
    return file


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(write(folder, text))
    return str(caught.value)


def test_minimal_configuration_gets_the_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL))
    assert config.replication.mode == "available"
    assert config.names == {1: "e1"}


ME, MY_GROUP, ROOT, SERVICE = 1000, 1001, 0, 500


@pytest.mark.parametrize(
    ("mode", "owner", "group", "me", "command"),
    [
        (0o600, ME, MY_GROUP, ME, ""),
        (0o700, ME, MY_GROUP, ME, ""),
        (0o644, ME, MY_GROUP, ME, "chmod go-rwx {}"),
        (0o640, ME, MY_GROUP, ME, "chmod go-rwx {}"),
        (0o602, ME, MY_GROUP, ME, "chmod go-rwx {}"),
        (0o640, ROOT, MY_GROUP, ME, ""),  # it is read by its group
        (0o644, ROOT, MY_GROUP, ME, "chmod o-rwx {}"),
        (0o644, ROOT, ROOT, ME, "chown 1000 {0} && chmod go-rwx {0}"),  # without the first, the sidecar could not read it any more
        (0o604, ROOT, MY_GROUP, ME, "chown 1000 {0} && chmod go-rwx {0}"),
        (0o640, ROOT, ROOT, ROOT, "chmod go-rwx {}"),
        (0o640, ROOT, SERVICE, ROOT, ""),  # root looks at what a service reads
        (0o640, SERVICE, SERVICE, ROOT, ""),
        (0o644, SERVICE, SERVICE, ROOT, "chmod o-rwx {}"),
    ],
)
def test_passwords_that_others_may_read(
    mode: int, owner: int, group: int, me: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a node.toml"
    file.write_text(MINIMAL)
    found = os.stat_result((0o100000 | mode, 0, 0, 1, owner, group, 0, 0, 0, 0))
    monkeypatch.setattr(Path, "stat", lambda _: found)
    monkeypatch.setattr(os, "geteuid", lambda: me)
    monkeypatch.setattr(os, "getegid", lambda: MY_GROUP if me else 0)
    monkeypatch.setattr(os, "getgroups", list)
    said = exposed(file)
    monkeypatch.undo()
    advice = command.format(f"'{file}'")
    assert said == (f"{file} holds secrets, and other users may use it (its mode is {mode:04o}): run: {advice}" if command else "")


def test_nodes_of_the_group_by_id(tmp_path: Path) -> None:
    config = load(write(tmp_path, MINIMAL + PEER.format(name="e2", id=2)))
    assert config.names == {1: "e1", 2: "e2"}
    assert config.settings().names == config.names


def test_sample_is_valid(tmp_path: Path) -> None:
    assert load(write(tmp_path, sample())).sites[0].remote_id == "west"


def test_documented_sample_is_up_to_date() -> None:
    documented = _BLOCK.search(DOC.read_text("utf-8"))
    assert documented
    assert documented[0] == sample(), "run: python tests/unit/test_config.py"


def test_every_key_is_documented_with_its_default() -> None:
    page = DOC.read_text("utf-8")
    keys = page[page.index("\n## Keys\n") : page.index("\n## `replicate`\n")]
    sections = dict(re.findall(r"^### `([^`]+)`\n(.*?)(?=^### |\Z)", keys, re.MULTILINE | re.DOTALL))
    assert sections.keys() == {heading.removeprefix("# ") for heading, _ in configuration._TABLES}
    for heading, model in configuration._TABLES:
        said = dict(re.findall(r"^- \*\*`(\w+)`\*\* \((.+?)\):\s", sections[heading.removeprefix("# ")], re.MULTILINE | re.DOTALL))
        known = {name: info for name, info in model.model_fields.items() if not configuration.models_in(info.annotation)}
        assert list(said) == list(known), heading
        for name, info in known.items():
            if info.is_required():
                assert said[name].endswith("required"), f"{heading} {name}"
            elif info.default is not None:
                assert said[name].endswith(f"default `{_shown(info.default)}`"), f"{heading} {name}"
            limits = [f"{getattr(limit, sign)}" for limit in info.metadata for sign in ("ge", "gt", "le", "lt") if hasattr(limit, sign)]
            assert set(limits) <= set(re.findall(r"\d+", said[name])), f"{heading} {name}: {limits}"


def _shown(value: object) -> str:
    return "{}" if value == {} else configuration.toml_value(value)


def test_sample_shows_the_true_defaults(tmp_path: Path) -> None:
    shown = tomllib.loads(sample())["replication"]
    assert shown == load(write(tmp_path, MINIMAL)).replication.model_dump()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param("id = 1", "id = 1\nident = 7", ["node.ident", "unknown key", "allowed", "group, id, name"], id="unknown key"),
        pytest.param("[http]", "[htpp]", ["htpp", "unknown key", "allowed", "broker, coordination, definitions, door, http"], id="unknown table"),
        pytest.param("id = 1", 'id = "one"', ["node.id", "'one'", "valid integer"], id="wrong type"),
        pytest.param("id = 1", "id = 256", ["node.id", "256", "less than or equal to 255"], id="id too large"),
        pytest.param("id = 1\n", "", ["node.id", "missing"], id="missing key"),
        pytest.param("5672", "none", ["broker.url", "amqp://USER:PASSWORD@HOST:PORT"], id="port that is no number"),
        pytest.param("amqp://lrq", "http://lrq", ["broker.url", "amqp://USER:PASSWORD@HOST:PORT"], id="wrong scheme"),
        pytest.param("lrq:secret@", "", ["broker.url", "amqp://USER:PASSWORD@HOST:PORT"], id="url without a user"),
        pytest.param("lrq:secret@", "lrq@", ["broker.url", "amqp://USER:PASSWORD@HOST:PORT"], id="url without a password"),
        pytest.param("[door]\n", '[door]\nproxy_protocol = ["10.0.0.5/24"]\n', ["door.proxy_protocol", "10.0.0.5/24", "network"], id="no network"),
        pytest.param("[door]\n", '[door]\nwhen_backup = "relay"\n', ["door.when_backup", "'relay'", "'forward'"], id="no way with clients"),
        pytest.param(":5672", ":5672/shop", ["broker.url", "without a virtual host"], id="url with a virtual host"),
        pytest.param(":5672", ":5672?heartbeat=5", ["broker.url", "without a virtual host or options"], id="url with options"),
        pytest.param("127.0.0.1:8080", "8080", ["http.listen", "'8080'", "HOST:PORT"], id="listen without a host"),
        pytest.param('"e1"', '"e 1"', ["node.name", "'e 1'", "letters, digits, dots or hyphens"], id="bad name"),
        pytest.param("127.0.0.1:5673", "5673", ["door.listen", "'5673'", "HOST:PORT"], id="door without a host"),
        pytest.param('"east"', '"-east"', ["node.group", "'-east'", "a letter or digit first"], id="hyphen first"),
        pytest.param("[http]", "[replication]\nheartbeat_s = 5\n[http]", ["replication: heartbeat_s", "5 and 5"], id="rare heartbeat"),
        pytest.param("[http]", "[replication]\nbackup_timeout_s = inf\n[http]", ["replication.backup_timeout_s", "finite", "inf"], id="infinite"),
        pytest.param("[http]", "[replication.completion]\n'(' = 'all'\n[http]", ["replication.completion", "regular expression"], id="bad pattern 2"),
        pytest.param("[http]", "[replication.completion]\nm = 'none'\n[http]", ["replication.completion", "'all' or 'local'"], id="bad completion"),
        pytest.param(
            "[http]", f"[replication]\nlog_bytes_max = {(1 << 30) - 1}\n[http]", ["log_bytes_max is 1073741823", "8 times door.message_bytes_max",
            "134217728"], id="no room for messages",
        ),
        pytest.param(
            "[http]", f"message_bytes_max = 1000\n[replication]\nlog_bytes_max = {1 << 20}\n[http]",
            ["8 times door.transaction_bytes_max", "67108864"], id="no room for transactions",
        ),
        pytest.param("[http]", "[replication]\nexpected_backups = 1\n[http]", ["expected_backups is 1", "0 peers"], id="too many expected"),
        pytest.param("[http]", LEVELS % ("^a", "some"), ["replication.replicate", "'^a'", "'some'", "none, configuration, all"], id="bad level"),
        pytest.param("[http]", LEVELS % ("(", "all"), ["replication.replicate", "'('", "no regular expression"], id="bad pattern"),
        pytest.param("[http]", "[replication]\nreplicate = ['a']\n[http]", ["replication.replicate", "dictionary"], id="no table of levels"),
        pytest.param("[http]", '[replication]\ncoordination = "etcd"\n[http]', ["needs the table [coordination]"], id="etcd without a table"),
        pytest.param("[http]", ETCD.format(static="static", more=""), ['"static" has no use for it'], id="a table without etcd"),
        pytest.param("[http]", ETCD.format(static="etcd", more="lease_ttl_s = 3.5"), ["whole seconds", "3.5"], id="a part of a second"),
        pytest.param("[http]", ETCD.format(static="etcd", more="lease_ttl_s = 2"), ["coordination.lease_ttl_s", "2"], id="a short lease"),
        pytest.param("[http]", ETCD.format(static="etcd", more='user = "lrq"'), ["user and password_file"], id="a user without a password"),
        pytest.param(
            "[http]", ETCD.format(static="etcd", more='user = "lrq"\npassword_file = "gone"'), ["password_file", "gone cannot be read"],
            id="no file with the password",
        ),
        pytest.param(
            "[http]", ETCD.format(static="etcd\"\nrestart_alone = true\nmode = \"strict", more=""), ["restart_alone has no use"], id="alone",
        ),
        pytest.param("[http]", ETCD.format(static="etcd", more='namespace = "a/"'), ["coordination.namespace", "begin with"], id="bad namespace"),
        pytest.param(
            "[http]", ETCD.replace("//h", "//u:secret@h").format(static="etcd", more=""), ["coordination.endpoints", "without a user"],
            id="a user in an endpoint",
        ),
        pytest.param("[http]", '[replication]\nmode = "loose"\n[http]', ["replication.mode", "'loose'", "'available' or 'strict'"], id="bad choice"),
    ],
)
def test_an_error_names_the_key_the_value_and_what_is_allowed(tmp_path: Path, before: str, after: str, told: list[str]) -> None:
    text = refusal(tmp_path, MINIMAL.replace(before, after))
    for part in [*told, str(tmp_path / "node.toml"), "docs/configuration.md"]:
        assert part in text


def test_all_errors_are_named_at_once(tmp_path: Path) -> None:
    text = refusal(tmp_path, MINIMAL.replace("id = 1", "id = 0").replace("127.0.0.1:8080", "here"))
    assert "node.id" in text
    assert "http.listen" in text


@pytest.mark.parametrize(("name", "number"), [("e2", 1), ("e1", 2)], ids=["id", "name"])
def test_nodes_need_their_own_names_and_ids(tmp_path: Path, name: str, number: int) -> None:
    assert "its own name and its own id" in refusal(tmp_path, MINIMAL + PEER.format(name=name, id=number))


def test_a_bad_key_of_a_peer_is_named_with_its_place(tmp_path: Path) -> None:
    peers = PEER.format(name="e2", id=2) + PEER.format(name="e3", id=3).replace("http://", "ftp://")
    text = refusal(tmp_path, MINIMAL + peers)
    assert "peers.1.http" in text
    assert "http://HOST:PORT" in text
    secure = PEER.format(name="e2", id=2).replace("http://", "https://")
    assert load(write(tmp_path, MINIMAL + secure)).peers[0].http == "https://127.0.0.1:8081"


def test_a_group_is_no_site_of_its_own(tmp_path: Path) -> None:
    site = '[[sites]]\nremote_id = "east"\ndoors = ["amqp://lrq:secret@127.0.0.1:5683"]\n'
    assert "east cannot be a site of its own" in refusal(tmp_path, MINIMAL + site)


def test_a_site_stands_once(tmp_path: Path) -> None:
    site = '[[sites]]\nremote_id = "west"\ndoors = ["amqp://lrq:secret@127.0.0.1:5683"]\n'
    assert "each remote_id of sites stands once" in refusal(tmp_path, MINIMAL + site * 2)
    assert len(load(write(tmp_path, MINIMAL + site)).sites) == 1


def test_the_first_pattern_that_fits_a_name_says_when_it_is_confirmed(tmp_path: Path) -> None:
    table = "[replication]\ncompletion = { 'slow$' = 'all', '^metrics\\.' = 'local' }\n"
    config = load(write(tmp_path, MINIMAL + table))
    names = ("metrics.cpu", "metrics.slow", "metrics", "old.metrics.cpu", "orders")
    assert [name for name in names if config.completes_locally(name)] == ["metrics.cpu"]
    assert config.settings().local_completion
    assert not load(write(tmp_path, MINIMAL)).settings().local_completion


# -- TLS and secrets


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


def with_tls(text: str, **keys: str) -> str:
    return text.replace("[http]", "[door.tls]\n" + "".join(f'{key} = "{value}"\n' for key, value in keys.items()) + "[http]")


def test_files_are_read_with_the_configuration_and_named_from_its_folder(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("door")
    (tmp_path / "door.pem").write_bytes(certificate.read_bytes())
    config = load(write(tmp_path, with_tls(MINIMAL, certificate="door.pem", key=str(key)).replace("amqp://", "amqps://")))
    assert config.server_tls is not None
    assert config.server_tls.context.minimum_version == ssl.TLSVersion.TLSv1_2
    assert config.server_tls.context.verify_mode == ssl.CERT_NONE
    assert config.client_tls is not None
    assert config.client_tls.context.verify_mode == ssl.CERT_REQUIRED
    assert config.client_tls.context.check_hostname
    assert config.broker_address("lrq").tls is config.client_tls


def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("one")
    other = authority.issue("other")[1]
    locked = tmp_path / "locked.key"
    subprocess.run(["openssl", "ec", "-in", key, "-aes128", "-passout", "pass:x", "-out", locked], check=True, capture_output=True)
    (tmp_path / "no.pem").write_text("hunter2")
    cases = {
        "door.tls: .*none.pem cannot be read: No such file": with_tls(MINIMAL, certificate="none.pem", key=str(key)),
        "other.key is not the key of .*one.pem": with_tls(MINIMAL, certificate=str(certificate), key=str(other)),
        "no.pem .*no certificate": with_tls(MINIMAL, certificate="no.pem", key=str(key)),
        "locked.key: the key is encrypted": with_tls(MINIMAL, certificate=str(certificate), key=str(locked)),
        "no.pem holds no certificate": with_tls(MINIMAL, certificate=str(certificate), key=str(key), ca="no.pem", verify="required"),
        'verify "optional" and "required" need ca': with_tls(MINIMAL, certificate=str(certificate), key=str(key), verify="required"),
        "tls: certificate and key are given together": MINIMAL + '[tls]\ncertificate = "x.pem"\n',
        "tls: .*none.pem cannot be read": MINIMAL.replace("amqp://", "amqps://") + '[tls]\nca = "none.pem"\n',
    }
    for told, text in cases.items():
        said = refusal(tmp_path, text)
        assert re.search(told, said), said
        assert "hunter2" not in said


@pytest.mark.parametrize("gone", ["certificate", "key", "ca"])
def test_a_file_that_goes_while_it_is_read_again_changes_nothing(
    tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch, gone: str
) -> None:
    """After the look whether it can be read: whoever replaces it may delete it first."""
    files = dict(zip(("certificate", "key"), authority.issue("door"))) | {"ca": authority.ca}
    found = tls.server_files(str(files["certificate"]), str(files["key"]), str(files["ca"]), "required", "1.2")
    context = found.context
    monkeypatch.setattr(tls, "_readable", lambda file: Path(file).rename(tmp_path / gone) if file == str(files[gone]) else None)
    try:
        with pytest.raises(tls.TlsError, match=rf"{files[gone].name}.* cannot be read: No such file"):
            found.refresh(force=True)
        assert found.context is context
    finally:
        (tmp_path / gone).rename(files[gone])


def test_users_of_certificates(tmp_path: Path, authority: Authority) -> None:
    certificate, key = authority.issue("door")
    keys = {"certificate": str(certificate), "key": str(key)}
    user = '[[door.tls.users]]\ncommon_name = "orders"\nuser = "{}"\npassword = "hunter2"\n'
    asked = {"ca": str(authority.ca), "verify": "optional"}
    assert load(write(tmp_path, with_tls(MINIMAL, **keys, **asked) + user.format("app"))).door.tls.users[0].user == "app"  # type: ignore[union-attr]
    for told, text in {
        'users need verify "optional" or "required"': with_tls(MINIMAL, **keys) + user.format("app"),
        "the sidecar's own user": with_tls(MINIMAL, **keys, **asked) + user.format("lrq"),
        "stands once": with_tls(MINIMAL, **keys, **asked) + user.format("app") * 2,
    }.items():
        said = refusal(tmp_path, text)
        assert told in said
        assert "hunter2" not in said


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("id = 1", 'id = 1\npasword = "hunter2"'),
        ('"amqp://lrq:secret@127.0.0.1:5672"', '"amqp://lrq:hunter2@127.0.0.1"'),
        ('"amqp://lrq:secret@127.0.0.1:5672"', '["amqp://lrq:hunter2@127.0.0.1:5672"]'),
        ('"amqp://lrq:secret@127.0.0.1:5672"', '"amqp://lrq:hunter2\u2100@127.0.0.1:5672"'),
        ("[http]", 'tls = "amqp://lrq:hunter2@h:1"\n[http]'),
        ("[http]", '[[peers]]\nname = "e2"\nid = 2\ndoor = "amqp://lrq:hunter2@h"\nhttp = "http://h:1"\n[http]'),
        ("[node]", 'peers = "amqp://lrq:hunter2@h:1"\n[node]'),
    ],
)
def test_a_secret_is_never_shown(tmp_path: Path, before: str, after: str) -> None:
    assert "hunter2" not in refusal(tmp_path, MINIMAL.replace(before, after))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml cannot be read: No such file.*--config"):
        load(tmp_path / "none.toml")


def test_not_toml(tmp_path: Path) -> None:
    assert "is not TOML" in refusal(tmp_path, "node: e1")
    (tmp_path / "node.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(tmp_path / "node.toml")


if __name__ == "__main__":
    DOC.write_text(_BLOCK.sub(lambda _: sample(), DOC.read_text("utf-8")), "utf-8")
