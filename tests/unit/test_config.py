"""The configuration: every error names the key, the value and what is allowed; the documented sample is the model's.

`python tests/unit/test_config.py` writes the sample in docs/configuration.md anew.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from lrq_ha.sidecar.config import ConfigError, load, sample

DOC = Path(__file__).parents[2] / "docs" / "configuration.md"
_BLOCK = re.compile(r"(?<=```toml\n).*?(?=```)", re.DOTALL)

MINIMAL = """\
[node]
name = "e1"
id = 1
group = "east"
[broker]
url = "amqp://lrq:secret@127.0.0.1:5672"
[door]
listen = "127.0.0.1:5673"
[http]
listen = "127.0.0.1:8080"
"""
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


def test_sample_shows_the_true_defaults(tmp_path: Path) -> None:
    shown = tomllib.loads(sample())["replication"]
    assert shown == load(write(tmp_path, MINIMAL)).replication.model_dump()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        pytest.param("id = 1", "id = 1\nident = 7", ["node.ident", "unknown key", "7", "allowed", "group, id, name"], id="unknown key"),
        pytest.param("[http]", "[htpp]", ["htpp", "unknown key", "allowed", "broker, door, http"], id="unknown table"),
        pytest.param("id = 1", 'id = "one"', ["node.id", "'one'", "valid integer"], id="wrong type"),
        pytest.param("id = 1", "id = 256", ["node.id", "256", "less than or equal to 255"], id="id too large"),
        pytest.param("id = 1\n", "", ["node.id", "missing"], id="missing key"),
        pytest.param("5672", "none", ["broker.url", "none", "amqp://USER:PASSWORD@HOST:PORT"], id="port that is no number"),
        pytest.param("amqp://lrq", "amqps://lrq", ["broker.url", "amqps", "amqp://USER:PASSWORD@HOST:PORT"], id="wrong scheme"),
        pytest.param("lrq:secret@", "", ["broker.url", "amqp://127.0.0.1:5672", "amqp://USER:PASSWORD@HOST:PORT"], id="url without a user"),
        pytest.param("127.0.0.1:8080", "8080", ["http.listen", "'8080'", "HOST:PORT"], id="listen without a host"),
        pytest.param('"e1"', '"e 1"', ["node.name", "'e 1'", "[A-Za-z0-9.-]"], id="bad name"),
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
    peers = PEER.format(name="e2", id=2) + PEER.format(name="e3", id=3).replace("http://", "https://")
    text = refusal(tmp_path, MINIMAL + peers)
    assert "peers.1.http" in text
    assert "http://HOST:PORT" in text


def test_a_group_is_no_site_of_its_own(tmp_path: Path) -> None:
    site = '[[sites]]\nremote_id = "east"\ndoors = ["amqp://lrq:secret@127.0.0.1:5683"]\n'
    assert "east cannot be a site of its own" in refusal(tmp_path, MINIMAL + site)


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
