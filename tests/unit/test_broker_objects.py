"""The objects of a broker, their differences, and the log's objects over entries, cuts and checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker_plugin.definitions import objects
from broker_plugin.definitions.changes import Changes, changes_in, entries_of, find_changes
from broker_plugin.definitions.logged import LoggedObjects
from broker_plugin.definitions.objects import KINDS, REPLICATED, Key, Objects, acts_by_itself, canonical, read_listing
from lrq_ha.errors import MalformedInput
from lrq_ha.proto import lrq_pb2 as pb

SECRET = "amqp://u:secret@localhost/"
POLICY = {"pattern": "^a", "apply-to": "queues", "definition": {"max-length": 3}, "priority": 0}


def answers(**more: list[dict[str, Any]]) -> dict[str, Any]:
    """The lists of RabbitMQ 4.3.6, shortened."""
    found: dict[str, Any] = {name: [] for name in KINDS if name != "user_limits"}
    found["vhosts"] = [
        {"name": "lrq", "description": "", "tags": [], "default_queue_type": "classic", "tracing": False},
        {"name": "shop", "description": "d", "tags": ["a", "b"], "default_queue_type": "quorum", "metadata": {}, "cluster_state": {"e1": "running"}},
    ]
    found["users"] = [
        {"name": "lrq", "password_hash": "x", "hashing_algorithm": "h", "tags": ["administrator"], "limits": {}},
        {"name": "app", "password_hash": "y", "hashing_algorithm": "h", "tags": [], "limits": {"max-channels": 5}},
    ]
    for name, rows in more.items():
        found[name] = [*found[name], *rows]
    return found


def listed(**more: list[dict[str, Any]]) -> Objects:
    return read_listing(answers(**more), "lrq").objects


def test_what_is_the_sidecars_and_the_brokers_own_is_left_out() -> None:
    rights = {"configure": ".*", "write": ".*", "read": ".*"}
    found = read_listing(
        answers(
            permissions=[{"user": "lrq", "vhost": "shop", **rights}, {"user": "app", "vhost": "lrq", **rights}],
            topic_permissions=[{"user": "lrq", "vhost": "/", "exchange": "x", "write": "", "read": ""}],
            policies=[{"vhost": "shop", "name": "own", **POLICY, "pattern": "^LRQ_"}, {"vhost": "lrq", "name": "size", **POLICY}],
            operator_policies=[{"vhost": "shop", "name": "o", **POLICY}],
            parameters=[
                {"component": "operator_policy", "vhost": "shop", "name": "o", "value": {}},
                {"component": "vhost-limits", "vhost": "shop", "name": "limits", "value": {"max-queues": 5}},
                {"component": "vhost-limits", "vhost": "lrq", "name": "limits", "value": {"max-queues": 5}},
            ],
            global_parameters=[{"name": "internal_cluster_id", "value": "z"}, {"name": "cluster_name", "value": "z"}, {"name": "g", "value": 1}],
        ),
        "lrq",
    )
    assert sorted(found.objects) == [
        ("global_parameters", "g"),
        ("operator_policies", "shop", "o"),
        ("parameters", "vhost-limits", "shop", "limits"),
        ("permissions", "lrq", "app"),
        ("user_limits", "app", "max-channels"),
        ("users", "app"),
        ("vhosts", "shop"),
    ]
    assert found.entered == {"shop"}
    assert json.loads(found.objects["vhosts", "shop"]) == {"description": "d", "tags": ["a", "b"], "default_queue_type": "quorum"}


def test_two_versions_say_the_same_of_a_vhost_without_anything() -> None:
    of_310 = {"name": "v", "description": "", "tags": [], "default_queue_type": "undefined"}
    assert listed(vhosts=[of_310]) == listed(vhosts=[{"name": "v", "tags": ""}])


@pytest.mark.parametrize("lost", ["vhosts", "users"])
def test_a_broker_that_has_lost_sight_of_its_store_is_not_believed(lost: str) -> None:
    with pytest.raises(MalformedInput, match="not whole"):
        read_listing({**answers(), lost: []}, "lrq")


@pytest.mark.parametrize("rows", [[{"nme": "x"}], [{"name": 5, "tags": []}], ["x"], 7, [{"name": "v", "tags": 5}]])
def test_an_answer_of_another_form_is_refused_and_not_quoted(rows: Any) -> None:
    with pytest.raises(MalformedInput, match="another form") as refused:
        read_listing({**answers(), "vhosts": rows}, "lrq")
    assert "nme" not in str(refused.value)


@pytest.mark.parametrize(
    ("key", "value", "acts"),
    [
        (("parameters", "shovel", "/", "s"), {"value": {"src-uri": SECRET}}, True),
        (("parameters", "federation-upstream", "/", "f"), {"value": {"uri": SECRET}}, True),
        (("parameters", "federation-upstream-set", "/", "f"), {"value": []}, True),
        (("parameters", "vhost-limits", "/", "limits"), {"value": {}}, False),
        (("policies", "/", "p"), {**POLICY, "definition": {"federation-upstream-set": "all", "max-length": 3}}, True),
        (("policies", "/", "p"), POLICY, False),
        (("global_parameters", "shovel"), {"value": 1}, False),
    ],
)
def test_what_acts_by_itself(key: Key, value: dict[str, Any], acts: bool) -> None:
    assert acts_by_itself(key, canonical(value)) is acts


def test_objects_for_people_have_no_values() -> None:
    shovel = ("parameters", "shovel", "shop", "s1")
    assert objects.told(shovel) == "shovel 's1' in vhost 'shop'"
    assert objects.told(("permissions", "shop", "app")) == "permissions of user 'app' in vhost 'shop'"
    assert objects.told(("user_limits", "app", "max-channels")) == "limit max-channels of user 'app'"
    assert objects.tell_some([("users", f"u{n}") for n in range(7)]).endswith("user 'u4' and 2 more")


def test_objects_are_set_in_an_order_in_which_they_can_be() -> None:
    keys = [("permissions", "a", "b"), ("policies", "a", "p"), ("users", "b"), ("vhosts", "a"), ("user_limits", "b", "max")]
    assert [key[0] for key in objects.in_order(keys)] == ["vhosts", "users", "user_limits", "permissions", "policies"]


# ---- the log's objects -----------------------------------------------------------------------------------------------

KEYS = st.sampled_from([("users", "a"), ("users", "b"), ("vhosts", "a"), ("policies", "a", "p"), ("user_limits", "a", "max")])
SETS = st.dictionaries(KEYS, st.sampled_from(['{"value":1}', '{"value":2}', "{}"]))


@given(SETS, SETS)
def test_a_difference_leads_from_one_set_to_the_other(before: Objects, after: Objects) -> None:
    changes = find_changes(before, after)
    assert bool(changes) is (before != after)
    logged = LoggedObjects()
    for sequence, each in enumerate([*entries_of(Changes(before, frozenset()), REPLICATED), *entries_of(changes, REPLICATED)], 1):
        logged.noted(sequence, each)
    assert logged.rows == after


@given(st.lists(st.tuples(SETS, st.sets(KEYS), st.sets(st.sampled_from(["users", "vhosts", "policies"])))), st.data())
def test_a_cut_and_a_look_back_say_what_was_then(entries: list[tuple[Objects, set[Key], set[str]]], data: st.DataObject) -> None:
    logged, states = LoggedObjects(), [(frozenset[str](), Objects())]
    for sequence, (given_, deleted, kinds) in enumerate(entries, 1):
        given_ = objects.of_kinds(given_, kinds)
        [entry] = entries_of(Changes(given_, frozenset(deleted - given_.keys())), kinds)
        logged.noted(sequence, entry)
        rows = {key: value for key, value in objects.of_kinds(states[-1][1], kinds).items() if key not in deleted} | given_
        states.append((frozenset(kinds), rows))
    safe = data.draw(st.integers(0, len(entries)))
    logged.safe(safe, data.draw(st.integers(0, len(entries))))
    for sequence in range(safe, len(states)):
        assert logged.at(sequence) == states[sequence]
    first = data.draw(st.integers(safe + 1, len(entries) + 1))
    logged.cut(first)
    assert (logged.kinds, logged.rows) == states[first - 1]
    other = LoggedObjects()
    other.restore(pb.DefinitionsChange.FromString(logged.export().SerializeToString()))
    assert (other.kinds, other.rows) == (logged.kinds, logged.rows)


def test_a_large_difference_takes_several_entries() -> None:
    many: Objects = {("users", f"u{number:04}"): canonical({"password_hash": "x" * 1000}) for number in range(2500)}
    entries = list(entries_of(Changes(many, frozenset({("users", "gone")})), ["users"]))
    assert len(entries) == 3
    assert max(entry.ByteSize() for entry in entries) < 1_200_000
    assert [len(entry.deleted) for entry in entries] == [1, 0, 0]
    assert {key: value for entry in entries for key, value in changes_in(entry).set.items()} == many


def test_an_object_of_a_kind_that_the_log_has_no_more_is_forgotten() -> None:
    logged = LoggedObjects()
    both: Objects = {("users", "a"): "{}", ("vhosts", "v"): "{}"}
    logged.noted(1, next(entries_of(Changes(both, frozenset()), ["users", "vhosts"])))
    logged.noted(2, pb.DefinitionsChange(kinds=["vhosts"]))
    assert logged.rows == {("vhosts", "v"): "{}"}
