"""Adds requested amounts to a pod template in YAML.

A template is a Pod, or an object that contains one (`spec.template`: Deployment, Job, StatefulSet). It changes only the
requested keys in the main container's `resources.requests` and `resources.limits`.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from outfitter_service.requests.amounts import RequestError

MAIN_CONTAINER = "flink-main-container"
"""Flink's name of the worker's container in its pod templates (`Constants.MAIN_CONTAINER_NAME`)."""


def request_in_pod_template(template: str, amounts: Mapping[str, str], *, container: str | None = None) -> str:
    """The template with `amounts` (key → quantity) as requests and as limits of its main container.

    The main container is the one named `container`. If None, it is `flink-main-container`, else the only one. A
    template without containers gets an empty one, as in Flink.

    Raises:
        RequestError: it is no YAML, no pod template, or the main container is ambiguous.
    """
    from ruamel.yaml import YAML

    yaml = YAML(typ="rt", pure=True)
    yaml.preserve_quotes = True
    yaml.composer.warn_double_anchors = False  # they are allowed, the later one counts
    yaml.width = 1_000_000  # never fold the user's long lines
    try:
        document = yaml.load(template)
    except RecursionError as error:
        raise RequestError("the pod template is nested too deeply") from error
    except Exception as error:
        # For an invalid tag (`!!int` without a value) the parser's constructors raise other errors.
        raise RequestError(f"the pod template is no YAML: {' '.join(str(error).split())}") from error
    if amounts:
        _request(_main_container(_pod_spec(document), container), amounts)
    else:
        _pod_spec(document)
    written = io.StringIO()
    yaml.dump(document, written)
    return written.getvalue()


def _mapping(value: Any, where: str) -> MutableMapping[str, Any]:
    if not isinstance(value, MutableMapping):
        raise RequestError(f"the pod template's {where} must be a mapping, not {type(value).__name__}")
    return value


def _pod_spec(document: Any) -> MutableMapping[str, Any]:
    if not isinstance(document, MutableMapping) or "spec" not in document:
        raise RequestError("the pod template has no spec; a Pod is needed, or an object with a spec.template")
    spec = _mapping(document["spec"], "spec")
    if "template" not in spec:
        return spec
    inner = _mapping(spec["template"], "spec.template")
    if "spec" not in inner:
        raise RequestError("the pod template has no spec.template.spec")
    return _mapping(inner["spec"], "spec.template.spec")


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
    problem = "no container" if not main else "more than one container"
    raise RequestError(
        f"the {of} has {problem} named {container or MAIN_CONTAINER}; its containers are {', '.join(names)}"
        + ("" if container else f" (name the worker's with {by})")
    )


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
