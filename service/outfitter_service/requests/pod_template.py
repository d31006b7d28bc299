"""Adds requested amounts to a pod template in YAML or JSON.

The pod is a Pod, or within another kind: a table has the places of Kubernetes' own kinds and of FlinkDeployment. In any
other kind the only pod template within counts. It changes only the requested keys in the main container's
`resources.requests` and `resources.limits`.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from outfitter_proto.support.printable import counted, printable
from outfitter_service.requests.amounts import RequestError

MAIN_CONTAINER = "flink-main-container"
"""Flink's name of the worker's container in its pod templates (`Constants.MAIN_CONTAINER_NAME`)."""
MOST_NAMES = 8
"""Most containers that a message names."""
LONGEST_NAME = 63
"""Most characters of a container's name in a message: as many as Kubernetes allows."""

Path = tuple[str | int, ...]

_WORKLOAD: tuple[Path, ...] = (("spec", "template", "spec"),)
PODS: Mapping[str, tuple[Path, ...]] = {
    "Pod": (("spec",),),
    "PodTemplate": (("template", "spec"),),
    **dict.fromkeys(
        ("DaemonSet", "Deployment", "Job", "ReplicaSet", "ReplicationController", "StatefulSet"), _WORKLOAD
    ),
    "CronJob": (("spec", "jobTemplate", "spec", "template", "spec"),),
    "FlinkDeployment": (("spec", "taskManager", "podTemplate", "spec"), ("spec", "podTemplate", "spec")),
}
"""Where a kind has the worker's pod; the first place that exists counts. Source: Kubernetes' API reference; of
FlinkDeployment that of Flink's operator, whose job managers have `spec.podTemplate` as well."""
_GROUPS = frozenset({"", "apps", "batch", "extensions", "flink.apache.org"})
"""The API groups of these kinds. Others have kinds of the same names."""


def request_in_pod_template(
    template: str,
    amounts: Mapping[str, str],
    *,
    container: str | None = None,
    warn: Callable[[str], None] = lambda _: None,
) -> str:
    """The template with `amounts` (key → quantity) as requests and as limits of its main container.

    The main container is the one named `container`. If None, it is `flink-main-container`, else the only one. A
    template without containers gets an empty one, as in Flink. JSON stays JSON. `warn` gets a sentence if other pods
    request the amounts, too.

    Raises:
        RequestError: it is no YAML, it has no pod template or several, or the main container is ambiguous.
    """
    if (document := _json(template)) is not None:
        _request_in(document, amounts, container, warn)
        try:
            return json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        except ValueError as error:
            raise RequestError("the pod template has a number that JSON cannot have") from error
    from ruamel.yaml import YAML
    from ruamel.yaml.composer import ComposerError

    yaml = YAML(typ="rt", pure=True)
    yaml.preserve_quotes = True
    yaml.composer.warn_double_anchors = False  # they are allowed, the later one counts
    yaml.width = 1_000_000  # never fold the user's long lines
    try:
        document = yaml.load(template)
    except RecursionError as error:
        raise RequestError("the pod template is nested too deeply") from error
    except ComposerError as error:
        raise RequestError("the pod template is no YAML of one document; give the worker's alone") from error
    except Exception as error:
        # For an invalid tag (`!!int` without a value) the parser's constructors raise other errors.
        raise RequestError(f"the pod template is no YAML: {' '.join(str(error).split())}") from error
    _request_in(document, amounts, container, warn)
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


def _json(template: str) -> Any:
    """The template, if it is a JSON object; a key that stands twice in it is for YAML's parser to refuse."""
    if not template.lstrip().startswith("{"):
        return None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(pairs) != len(dict(pairs)):
            raise ValueError("a key is given twice")
        return dict(pairs)

    try:
        return json.loads(template, object_pairs_hook=unique)
    except (ValueError, RecursionError):
        return None


def _request_in(document: Any, amounts: Mapping[str, str], container: str | None, warn: Callable[[str], None]) -> None:
    spec, path = _pod_spec(document)
    if amounts:
        main = _main_container(spec, container)
        _refuse_shared(document, path, main)
        _request(main, amounts)
        if document.get("kind") == "FlinkDeployment" and path == PODS["FlinkDeployment"][1]:
            warn("job managers request the amounts as well: spec.podTemplate is theirs, too; use spec.taskManager")


def _refuse_shared(document: Any, path: Path, main: Any) -> None:
    """Refuse a pod or container that YAML's aliases show in another place, too: that pod would request as much."""
    seen: set[int] = set()
    shared: set[int] = set()
    left = [document]
    while left:
        value = left.pop()
        if not isinstance(value, Mapping | list):
            continue
        if id(value) in seen:
            shared.add(id(value))
            continue
        seen.add(id(value))
        left += value.values() if isinstance(value, Mapping) else value
    steps = [document]
    for key in path:
        steps.append(steps[-1][key])
    if not shared.isdisjoint(map(id, (*steps, steps[-1]["containers"], main))):
        raise RequestError(
            f"the pod template's {_dotted(path)} stands in another place as well, by a YAML alias: write the worker's "
            "pod out, so that no other pod requests the amounts"
        )


def _mapping(value: Any, where: str) -> MutableMapping[str, Any]:
    if not isinstance(value, MutableMapping):
        raise RequestError(f"the pod template's {where} must be a mapping, not {type(value).__name__}")
    return value


def _pod_spec(document: Any) -> tuple[MutableMapping[str, Any], Path]:
    """The pod's spec, and its place."""
    if not isinstance(document, MutableMapping):
        raise RequestError("the pod template has no spec; a Pod is needed, or an object with a pod template within")
    kind = document.get("kind") or _likely_kind(document)
    group = str(document.get("apiVersion", "")).rpartition("/")[0]
    places = PODS.get(kind) if isinstance(kind, str) and group in _GROUPS else None
    if places is None:
        places = tuple(_pods_within(document, (), set()))
        if not places:
            raise RequestError(
                f"this {kind or 'object without a kind'} has no pod template; "
                "a Pod is needed, or an object with a pod template within"
            )
        if len(places) > 1:
            named = ", ".join(_dotted(path[:-1]) for path in places)
            raise RequestError(f"this {kind or 'object'} has several pod templates ({named}); give one alone, as a Pod")
    path = next((path for path in places if _there(document, path)), places[0])
    found: Any = document
    for depth, key in enumerate(path):
        if isinstance(found, Mapping) and key not in found:
            others = "".join(f" or {_dotted(other)}" for other in places if other != path)
            raise RequestError(f"the pod template has no {_dotted(path)}{others}")
        inner: Any = found if isinstance(found, list) else _mapping(found, _dotted(path[:depth]))
        found = inner[key]
    return _mapping(found, _dotted(path)), path


def _there(document: Any, path: Path) -> bool:
    for key in path:
        if not isinstance(document, Mapping) or key not in document:
            return False
        document = document[key]
    return True


def _likely_kind(document: Mapping[str, Any]) -> str | None:
    """What an object without a kind is: a Pod or a workload, if its spec looks like that of one."""
    spec = document.get("spec")
    if not isinstance(spec, Mapping) or not spec or "containers" in spec:
        return "Pod"
    return "Deployment" if "template" in spec else None


def _pods_within(value: Any, path: Path, seen: set[int]) -> Iterator[Path]:
    """The places of all pod specs below `value`: mappings in a field `spec` that list containers. `seen`: what is
    looked at once only, though YAML's aliases show it in several places."""
    if not isinstance(value, Mapping | list) or id(value) in seen:
        return
    seen.add(id(value))
    if path[-1:] == ("spec",) and isinstance(value, Mapping) and isinstance(value.get("containers"), list):
        yield path
        return
    for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from _pods_within(inner, (*path, key), seen)


def _dotted(path: Path) -> str:
    return ".".join(map(str, path))


def _main_container(spec: MutableMapping[str, Any], container: str | None) -> MutableMapping[str, Any]:
    containers = spec.get("containers")
    if containers is None:
        containers = spec["containers"] = []
    if not isinstance(containers, list):
        raise RequestError("the pod template's containers must be a list")
    named = [_mapping(item, f"containers[{position}]") for position, item in enumerate(containers)]
    if not named:
        containers.append({"name": container or MAIN_CONTAINER})
        return _mapping(containers[-1], "containers[0]")
    names = [str(item.get("name")) for item in named]
    return named[main_container(names, container, of="pod template", by="--container")]


def main_container(names: Sequence[str], container: str | None, *, of: str, by: str) -> int:
    """The position of the main container among the containers with these `names`: see `request_in_pod_template`.
    `of`: what contains them; `by`: how people name another one. Both are for the message.

    Raises:
        RequestError: it is ambiguous, or not there.
    """
    main = [position for position, name in enumerate(names) if name == (container or MAIN_CONTAINER)]
    if len(main) == 1:
        return main[0]
    if not main and container is None and len(names) == 1:
        return 0
    if not names:
        raise RequestError(f"the {of} has no container")
    problem = "no container" if not main else "more than one container"
    raise RequestError(
        f"the {of} has {problem} named {shown(container or MAIN_CONTAINER)}; its containers are {_listed(names)}"
        + ("" if container else f" (name the worker's with {by})")
    )


def _listed(names: Sequence[str]) -> str:
    """The first ones of these names, and the number of the others."""
    more = counted(len(names) - MOST_NAMES, "other")
    return ", ".join(map(shown, names[:MOST_NAMES])) + (f" and {more}" if len(names) > MOST_NAMES else "")


def shown(name: str) -> str:
    """A container's name, which nobody has checked yet, for a message."""
    text = printable(name[: LONGEST_NAME + 1])
    return text if len(text) <= LONGEST_NAME else f"{text[:LONGEST_NAME]}…"


def _request(container: MutableMapping[str, Any], amounts: Mapping[str, str]) -> None:
    from ruamel.yaml.comments import CommentedMap
    from ruamel.yaml.scalarstring import DoubleQuotedScalarString

    # Make new mappings: others may share the existing ones through YAML's aliases.
    resources = CommentedMap(_own(container.get("resources"), "resources"))
    for field in ("requests", "limits"):
        quantities = CommentedMap(_own(resources.get(field), f"resources.{field}"))
        for key, amount in amounts.items():
            quantities[key] = DoubleQuotedScalarString(amount)
        resources[field] = quantities
    container["resources"] = resources


def _own(value: Any, where: str) -> MutableMapping[str, Any]:
    return _mapping({} if value is None else value, f"main container's {where}")
