"""The objects that operators set at a broker: their kinds, keys and values. No I/O.

Rules:
- A key is the kind and the names that are unique within it. A value is JSON with sorted keys, so equal values are equal
  texts.
- The table KINDS stands in the order in which objects can be set; they are deleted in the reverse order.
- Some objects are each broker's own, and in no log: those of the sidecar, and what names the broker itself.
- Some objects act by themselves (shovels, federation): only the primary's broker has them, or each broker would act.
- A value may hold a password or a hash, so no text for people has a value.

Source: RabbitMQ's HTTP API (rabbitmq_management 3.10.8 and 4.3.6).
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lrq_ha.errors import MalformedInput
from lrq_ha.routing.names import ROUTING_VHOST

Key = tuple[str, ...]  # kind and names
Objects = dict[Key, str]  # values by key

SHOWN_MAX = 5


@dataclass(frozen=True)
class Kind:
    """A kind of objects.

    Attributes:
        name: As the first part of a key.
        replicate: The word for it in the configuration.
        path: Of the management API.
        names: The fields of a row that are the object's names, in the order of the path.
        values: The fields that are its value.
        label: For people; takes the names in the order of `names`.
        tells: Whether a broker's reason to refuse a value may be shown: no value holds a secret.
    """

    name: str
    replicate: str
    path: str
    names: tuple[str, ...]
    values: tuple[str, ...]
    label: str
    tells: bool = True


_POLICY = ("pattern", "definition", "priority", "apply-to")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("vhosts", "vhosts", "vhosts", ("name",), ("description", "tags", "default_queue_type"), "vhost '{}'"),
        Kind("users", "users", "users", ("name",), ("password_hash", "hashing_algorithm", "tags"), "user '{}'", tells=False),
        Kind("user_limits", "users", "user-limits", ("user", "name"), ("value",), "limit {1} of user '{0}'"),
        Kind(
            "permissions", "permissions", "permissions", ("vhost", "user"), ("configure", "write", "read"),
            "permissions of user '{1}' in vhost '{0}'",
        ),
        Kind(
            "topic_permissions", "topic_permissions", "topic-permissions", ("vhost", "user", "exchange"), ("write", "read"),
            "topic permissions of user '{1}' at exchange '{2}' in vhost '{0}'",
        ),
        Kind("policies", "policies", "policies", ("vhost", "name"), _POLICY, "policy '{1}' in vhost '{0}'"),
        Kind("operator_policies", "operator_policies", "operator-policies", ("vhost", "name"), _POLICY, "operator policy '{1}' in vhost '{0}'"),
        Kind("parameters", "parameters", "parameters", ("component", "vhost", "name"), ("value",), "{0} '{2}' in vhost '{1}'", tells=False),
        Kind("global_parameters", "global_parameters", "global-parameters", ("name",), ("value",), "global parameter '{}'", tells=False),
    )
}  # fmt: skip
#: The words of the configuration, in order.
REPLICATED = tuple(dict.fromkeys(kind.replicate for kind in KINDS.values()))
_ORDER = {name: place for place, name in enumerate(KINDS)}
_OF_POLICIES = ("policy", "operator_policy")  # the API lists policies among the parameters, too
_OF_THE_BROKER = frozenset({"cluster_name", "cluster_tags", "internal_cluster_id", "imported_definition_hash_value"})
_ACTS = frozenset({"shovel", "federation-upstream", "federation-upstream-set"})
_UNSET = (None, "undefined", "")


class Listing(NamedTuple):
    """The objects of a broker.

    Attributes:
        objects: All but the broker's own.
        entered: The vhosts in which the sidecar's user has all rights.
    """

    objects: Objects
    entered: frozenset[str]


def of_kinds(objects: Objects, kinds: Collection[str]) -> Objects:
    """The objects that belong to these words of the configuration."""
    return {key: value for key, value in objects.items() if KINDS[key[0]].replicate in kinds}


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Keys in an order in which the objects can be set."""
    return sorted(keys, key=lambda key: (_ORDER[key[0]], key))


def told(key: Key) -> str:
    """An object for people."""
    return KINDS[key[0]].label.format(*key[1:])


def tell_some(keys: Collection[Key]) -> str:
    """The first few of some objects for people."""
    shown = ", ".join(told(key) for key in in_order(keys)[:SHOWN_MAX])
    return f"{shown} and {len(keys) - SHOWN_MAX} more" if len(keys) > SHOWN_MAX else shown


def acts_by_itself(key: Key, value: str) -> bool:
    """Whether an object makes its broker move messages: a shovel, a federation upstream, or a policy that uses one."""
    if key[0] == "parameters":
        return key[1] in _ACTS
    return key[0] == "policies" and any(name.startswith("federation-") for name in json.loads(value).get("definition", {}))


def read_listing(answers: dict[str, Any], user: str) -> Listing:
    """The objects in the answers of the management API.

    Args:
        answers: The lists of the API by the names of their kinds, all but the limits of users, which are in the users.
        user: The sidecar's.

    Raises:
        MalformedInput: An answer has another form, or lacks the sidecar's own user or vhost: a broker that has lost
            sight of its store lists nothing, and nothing must be deleted for that.
    """
    objects: Objects = {}
    try:
        for name, rows in answers.items():
            for row in rows:
                objects.update(_read_row(KINDS[name], row))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise MalformedInput(f"the management API's answer has another form than expected ({type(error).__name__})") from None
    for key in (("vhosts", ROUTING_VHOST), ("users", user)):
        if key not in objects:
            raise MalformedInput(f"the management API's answer lacks {told(key)}, which exists: it is not whole", todo="It is asked again")
    rights = json.dumps({"configure": ".*", "read": ".*", "write": ".*"}, separators=(",", ":"))
    entered = frozenset(key[1] for key, value in objects.items() if key[0] == "permissions" and key[2] == user and value == rights)
    return Listing({key: value for key, value in objects.items() if not is_own(key, value, user)}, entered)


def _read_row(kind: Kind, row: dict[str, Any]) -> Iterator[tuple[Key, str]]:
    names = tuple(row[name] for name in kind.names)
    if not all(isinstance(name, str) for name in names):
        raise TypeError
    if kind.name == "vhosts":
        row = {"description": "", "tags": [], "default_queue_type": None, **row}
    found = {field: row[field] for field in kind.values if field != "default_queue_type" or row[field] not in _UNSET}
    if "tags" in found:
        found["tags"] = _tags(found["tags"])
    yield (kind.name, *names), canonical(found)
    if kind.name == "users":
        for limit, value in (row.get("limits") or {}).items():
            yield ("user_limits", *names, limit), canonical({"value": value})


def _tags(value: list[str] | str) -> list[str]:
    """Tags as a list; earlier versions say them with commas."""
    return [tag for tag in value.split(",") if tag] if isinstance(value, str) else list(value)


def canonical(value: dict[str, Any]) -> str:
    """A value as text: equal values are equal texts."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def is_own(key: Key, value: str, user: str) -> bool:
    """Whether an object is each broker's own. `user`: the sidecar's."""
    match key:
        case ("vhosts", vhost):
            return vhost == ROUTING_VHOST
        case ("users" | "user_limits", name, *_):
            return name == user
        case ("permissions" | "topic_permissions", _, name, *_):
            return name == user
        case ("policies" | "operator_policies", vhost, _):
            return vhost == ROUTING_VHOST or json.loads(value)["pattern"].startswith("^LRQ_")
        case ("parameters", component, vhost, _):
            return vhost == ROUTING_VHOST or component in _OF_POLICIES
        case ("global_parameters", name):
            return name in _OF_THE_BROKER
    return False
