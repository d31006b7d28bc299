"""Answers an AdmissionReview of admission.k8s.io/v1: a JSON patch of one container, or why the pod is denied.

Pure functions of the review and of the configuration. Only the fields that matter here are decoded, so that a large pod
costs little memory. The patch adds only what is missing, so the answer to a large pod is no larger than another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Context, Decimal
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from outfitter_proto.support.printable import printable
from outfitter_service.config import ConfigProblem, ConfigurationError
from outfitter_service.requests.amounts import RequestError
from outfitter_service.requests.annotation import ANNOTATION
from outfitter_service.requests.pod_template import main_container, shown

CONTAINER_ANNOTATION = "outfitter.dev/container"
"""Names the worker's container, where the pod has several and none is called as Flink's is."""
API_VERSION, KIND = "admission.k8s.io/v1", "AdmissionReview"
FIELDS = ("requests", "limits")
LONGEST_UID = 256
"""Longest id of a request that we send back. Kubernetes uses UUIDs."""
LONGEST_DENIAL = 4096
"""Longest message of a denial. It has names of containers, which nobody has checked yet."""
INVALID = 422
"""The status of a denial, as the API server has it for its own validation."""

AmountsOf = Callable[[str], Mapping[str, str]]
"""Extended resource name → quantity for an annotation's text: see `annotated_amounts`."""


class ReviewOutcome(StrEnum):
    """What came of a request, for the metric. `REFUSED`: it was no review, and has no answer of that kind."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    DENIED = "denied"
    REFUSED = "refused"


class NoReviewError(ValueError):
    """The body is no AdmissionReview that we understand. The message says what would be one."""


class Kind(Struct, frozen=True):
    group: str = ""
    version: str = ""
    kind: str = ""


class AdmissionRequest(Struct, frozen=True):
    """`object`: the JSON of the object as it will be; null in a deletion."""

    uid: str
    kind: Kind
    operation: str
    object: Raw = Raw(b"null")


class Review(Struct, frozen=True, rename={"api_version": "apiVersion"}):
    api_version: str
    kind: str
    request: AdmissionRequest


class Metadata(Struct, frozen=True):
    annotations: dict[str, str] | None = None


class ResourceRequirements(Struct, frozen=True):
    requests: Any = None
    limits: Any = None


class Container(Struct, frozen=True):
    name: str
    resources: ResourceRequirements | None = None


class Spec(Struct, frozen=True):
    containers: list[Container]


class Pod(Struct, frozen=True):
    metadata: Metadata
    spec: Spec


class Status(Struct, frozen=True):
    """As much of a Status of meta/v1 as a denial has."""

    message: str
    reason: str = "Invalid"
    code: int = INVALID


class AdmissionResponse(Struct, frozen=True, omit_defaults=True, rename={"patch_type": "patchType"}):
    """`patch`: JSON; on the wire in base64."""

    uid: str
    allowed: bool
    status: Status | UnsetType = UNSET
    patch: bytes | UnsetType = UNSET
    patch_type: str | UnsetType = UNSET


class Answer(Struct, frozen=True, rename={"api_version": "apiVersion"}):
    response: AdmissionResponse
    api_version: str = API_VERSION
    kind: str = KIND


class _Operation(Struct, frozen=True):
    """One operation of a JSON patch (RFC 6902). To add what is there replaces it."""

    path: str
    value: Any
    op: str = "add"


_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_review = msgspec.json.Decoder(Review)
_pod = msgspec.json.Decoder(Pod)
_encode = msgspec.json.Encoder().encode
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(?:(?P<unit>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?[0-9]{1,4}))?"
)
LONGEST_QUANTITY = 64
"""Longest quantity that we compare. Kubernetes itself has no more than 2^63 - 1, with nine decimals."""
_EXACT = Context(prec=2 * LONGEST_QUANTITY)
_UNITS = (
    {unit: Decimal(f"1e{power}") for unit, power in zip("numkMGTPE", (-9, -6, -3, 3, 6, 9, 12, 15, 18), strict=True)}
    | {f"{unit}i": Decimal(1024**power) for power, unit in enumerate("KMGTPE", 1)}
)  # fmt: skip


def answer(body: bytes | bytearray, amounts_of: AmountsOf) -> tuple[bytes, ReviewOutcome]:
    """The answer to a review, and what came of it. Only the creation of a pod that asks by annotation is changed.

    Raises:
        NoReviewError: the body is no AdmissionReview of v1.
    """
    request = _request(body)
    if (request.operation, request.kind) != ("CREATE", Kind("", "v1", "Pod")):
        return _unchanged(request)
    try:
        patch = [*_patch(request.object, amounts_of)]
    except (ConfigurationError, RequestError) as error:
        denial = AdmissionResponse(uid=request.uid, allowed=False, status=Status(_message(error)))
        return _encode(Answer(denial)), ReviewOutcome.DENIED
    if not patch:
        return _unchanged(request)
    response = AdmissionResponse(uid=request.uid, allowed=True, patch=_encode(patch), patch_type="JSONPatch")
    return _encode(Answer(response)), ReviewOutcome.CHANGED


def _request(body: bytes | bytearray) -> AdmissionRequest:
    try:
        review = _review.decode(body)
    except _UNREADABLE as error:
        raise NoReviewError(f"the body is no {KIND}: {error}") from error
    if (review.api_version, review.kind) != (API_VERSION, KIND):
        raise NoReviewError(
            f"the body is a {review.kind[:80]!r} of {review.api_version[:80]!r}; only {KIND} of {API_VERSION} is known"
        )
    if not 0 < len(review.request.uid) <= LONGEST_UID:
        raise NoReviewError(f"the request's uid must have 1 to {LONGEST_UID} characters")
    return review.request


def _message(error: Exception) -> str:
    text = "\n".join(printable(line) for line in str(error)[:LONGEST_DENIAL].split("\n"))
    return text if len(text) <= LONGEST_DENIAL else f"{text[:LONGEST_DENIAL]}…"


def _unchanged(request: AdmissionRequest) -> tuple[bytes, ReviewOutcome]:
    return _encode(Answer(AdmissionResponse(uid=request.uid, allowed=True))), ReviewOutcome.UNCHANGED


def _patch(encoded: Raw, amounts_of: AmountsOf) -> Iterator[_Operation]:
    """What the pod lacks of what it asks for.

    Raises:
        NoReviewError: it is no pod.
        ConfigurationError, RequestError: it cannot have what it asks for.
    """
    try:
        pod = _pod.decode(encoded)
    except _UNREADABLE as error:
        raise NoReviewError(f"the request's object is no pod: {error}") from error
    annotations = pod.metadata.annotations or {}
    if ANNOTATION not in annotations:
        return
    amounts = amounts_of(annotations[ANNOTATION])
    if not amounts:
        return
    asked = {key: amount for key, amount in amounts.items() if amount != "0"}
    containers = pod.spec.containers
    if not asked and not any(amounts.keys() & _quantities(each, field) for each in containers for field in FIELDS):
        return
    position = main_container(
        [container.name for container in containers],
        annotations.get(CONTAINER_ANNOTATION),
        of="pod",
        by=f"the annotation {CONTAINER_ANNOTATION}",
    )
    container = containers[position]
    _check_own(container, amounts)
    yield from _missing(container, asked, f"/spec/containers/{position}/resources")


def _missing(container: Container, asked: Mapping[str, str], path: str) -> Iterator[_Operation]:
    """The quantities that the container lacks, each alone, or in the mapping that is not there either. `path`: of its
    resources."""
    if not asked:
        return
    if container.resources is None:
        yield _Operation(path, dict.fromkeys(FIELDS, asked))
        return
    for field in FIELDS:
        if not isinstance(getattr(container.resources, field), dict):
            yield _Operation(f"{path}/{field}", asked)
            continue
        present = _quantities(container, field)
        for key in [each for each in asked if each not in present]:
            yield _Operation(f"{path}/{field}/{key.replace('~', '~0').replace('/', '~1')}", asked[key])


def _check_own(container: Container, amounts: Mapping[str, str]) -> None:
    """Refuse quantities of the container's own that contradict the annotation.

    Raises:
        ConfigurationError: it lists all of them.
    """
    problems = [
        ConfigProblem(
            file=f"container {shown(container.name)}",
            key=f"resources.{field}.{key}",
            found=str(quantities[key]),
            problem=f"differs from what the annotation {ANNOTATION} asks for, which is {amount}",
            suggestion="keep one of them",
        )
        for field in FIELDS
        for quantities in [_quantities(container, field)]
        for key, amount in amounts.items()
        if key in quantities and _number(quantities[key]) != int(amount)
    ]
    if problems:
        raise ConfigurationError(problems)


def _quantities(container: Container, field: str) -> dict[str, Any]:
    found = getattr(container.resources, field, None) or {}
    if not isinstance(found, dict):
        raise RequestError(f"the container {shown(container.name)}'s resources.{field} must be a mapping")
    return found


def _number(quantity: Any) -> Decimal | None:
    """The value of a Kubernetes quantity, as resource.Quantity reads it: 1, 1.0, +1, 1e0 and 1000m are the same. None:
    it is no quantity."""
    text = str(quantity) if isinstance(quantity, str | int | float) else ""
    if len(text) > LONGEST_QUANTITY or (match := _QUANTITY.fullmatch(text)) is None:
        return None
    unit = _UNITS[match["unit"]] if match["unit"] else Decimal(f"1e{match['exponent'] or 0}")
    return _EXACT.multiply(Decimal(match["number"]), unit)
