"""Check of a job's pod fields against the chart's `jobs.allowed`.

Example:
    >>> from rlhfspec.operator.allowed_fields import Allowed
    >>> template = {"spec": {"hostNetwork": True, "nodeSelector": {"gpu": "h200"}}}
    >>> list(refused(template, Allowed().of_role("reward"), "spec.podTemplate"))
    ['spec.podTemplate.spec.hostNetwork']
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from rlhfspec.cluster import names
from rlhfspec.operator.allowed_fields import CONTAINERS_PATH, VOLUMES_PATH
from rlhfspec.operator.deciding.situation import NamedObject, Situation

CONTAINERS = ("containers", "initContainers")
# Fields that name another object of the namespace, which needs the label.
_REFERENCES = {
    "spec.imagePullSecrets.name": "Secret",
    f"{CONTAINERS_PATH}.env.valueFrom.secretKeyRef.name": "Secret",
    f"{CONTAINERS_PATH}.env.valueFrom.configMapKeyRef.name": "ConfigMap",
    f"{CONTAINERS_PATH}.envFrom.secretRef.name": "Secret",
    f"{CONTAINERS_PATH}.envFrom.configMapRef.name": "ConfigMap",
    f"{VOLUMES_PATH}.secret.secretName": "Secret",
    f"{VOLUMES_PATH}.configMap.name": "ConfigMap",
    f"{VOLUMES_PATH}.projected.sources.secret.name": "Secret",
    f"{VOLUMES_PATH}.projected.sources.configMap.name": "ConfigMap",
    f"{VOLUMES_PATH}.persistentVolumeClaim.claimName": "PersistentVolumeClaim",
}
_KEPT_VOLUMES = frozenset(("config", "credentials", "storage", "token"))  # mounted by the operator alone


@dataclass(frozen=True, slots=True)
class _Field:
    path: str  # without list indices
    shown: str
    value: Any


def not_allowed(known: Situation) -> str:
    """Return an error about the first field that `jobs.allowed` refuses, or an empty text."""
    allowed = known.settings.allowed
    for role, path, template in _templates(known):
        whose = "" if role in allowed.code_roles else f" in pods of {role}"
        for field in refused(template, allowed.of_role(role), path):
            return f"{field}: not allowed{whose} by jobs.allowed of the operator's chart"
        for field in _taken(template, known.settings.pod_template, path):
            return f"{field}: this name is reserved by the operator or its chart; choose another"
    for role in names.ROLES:
        image = getattr(known.spec.roles, role).image
        if image is not None and not _is_allowed(_Field(f"{CONTAINERS_PATH}.image", "", image), allowed.of_role(role)):
            return f"spec.roles.{role}.image: not allowed in pods of {role} by jobs.allowed of the operator's chart"
    return ""


def references(known: Situation) -> tuple[NamedObject, ...]:
    """Return the Secrets, ConfigMaps and claims that the job names."""
    storage, found = known.spec.storage, list[NamedObject]()
    if storage.secret is not None:
        found.append(NamedObject("Secret", storage.secret, "spec.storage.secret"))
    if (gateway := known.spec.roles.gateway).workers and gateway.token_secret is not None:
        found.append(NamedObject("Secret", gateway.token_secret, "spec.roles.gateway.tokenSecret"))
    if storage.claim not in (None, known.settings.claim):
        found.append(NamedObject("PersistentVolumeClaim", str(storage.claim), "spec.storage.claim"))
    for _, path, template in _templates(known):
        for field in _fields(template, "", path, _above(tuple(_REFERENCES))):
            if field.path in _REFERENCES and isinstance(field.value, str):
                found.append(NamedObject(_REFERENCES[field.path], field.value, field.shown))
    return tuple({(each.kind, each.name): each for each in reversed(found)}.values())


def refused(template: Mapping[Any, Any], allowed: Collection[str], path: str) -> Iterator[str]:
    """Yield the fields of a pod template that no entry of `allowed` covers."""
    for field in _fields(template, "", path, _above(tuple(allowed))):
        if not _is_allowed(field, allowed):
            yield field.shown


def _templates(known: Situation) -> Iterator[tuple[str, str, Mapping[Any, Any]]]:
    """Yield (role, path, template); one for all roles is paired with the role that may set the fewest fields."""
    least = next((role for role in names.ROLES if role not in known.settings.allowed.code_roles), names.ROLES[0])
    if known.spec.pod_template:
        yield least, "spec.podTemplate", known.spec.pod_template
    for role in names.ROLES:
        if template := getattr(known.spec.roles, role).pod_template:
            yield role, f"spec.roles.{role}.podTemplate", template


def _fields(value: Any, path: str, shown: str, above: Collection[str]) -> Iterator[_Field]:
    """Yield the fields in `value`, descending only at paths in `above`; `shown` is `path` with list indices."""
    if path in above and isinstance(value, Mapping):
        for name, each in value.items():
            name_as = "containers" if (path, name) == ("spec", "initContainers") else name
            yield from _fields(each, f"{path}.{name_as}" if path else name, f"{shown}.{name}", above)
    elif path in above and isinstance(value, list):
        for number, each in enumerate(value):
            yield from _fields(each, path, f"{shown}[{number}]", above)
    else:
        yield _Field(path, shown, value)


@cache
def _above(paths: Collection[str]) -> frozenset[str]:
    """Return all parents of the entries' paths that are not entries themselves.

    >>> sorted(_above(("spec.volumes.name", "spec.dnsPolicy=None")))
    ['', 'spec', 'spec.volumes']
    """
    parts = [entry.partition("=")[0].split(".") for entry in paths]
    return frozenset(".".join(each[:end]) for each in parts for end in range(len(each))) - set(paths)


def _is_allowed(field: _Field, allowed: Collection[str]) -> bool:
    """Return whether an entry allows the whole field, or entries allow each of its values.

    >>> _is_allowed(_Field("spec.containers.env.name", "", "NCCL_DEBUG"), ["spec.containers.env.name=NCCL_*"])
    True
    >>> [_is_allowed(_Field("drop", "", value), ["drop=ALL"]) for value in (["ALL"], ["KILL"], [], None)]
    [True, False, False, False]
    """
    if field.path in allowed:
        return True
    values = field.value if isinstance(field.value, list) else [field.value]
    texts = [str(value).lower() if isinstance(value, bool) else value for value in values]
    patterns = [value for path, _, value in (entry.partition("=") for entry in allowed) if path == field.path]
    return bool(texts) and all(
        isinstance(text, str) and any(fnmatchcase(text, pattern) for pattern in patterns) for text in texts
    )


def _taken(template: Mapping[Any, Any], clusters: Mapping[Any, Any], path: str) -> Iterator[str]:
    """Yield where a template changes containers of `clusters`, the chart's template, or mounts reserved volumes."""
    containers = {each["name"] for each in containers_of(clusters)} - {names.CONTAINER}
    volumes = _KEPT_VOLUMES | {each["name"] for each in clusters.get("spec", {}).get("volumes", ())}
    for kind in CONTAINERS:
        for number, container in enumerate(template.get("spec", {}).get(kind) or ()):
            shown = f"{path}.spec.{kind}[{number}]"
            if container["name"] in containers:
                yield f"{shown}.name"
            mounts = container.get("volumeMounts")
            for index, mount in enumerate(mounts if isinstance(mounts, list) else ()):
                if isinstance(mount, Mapping) and mount.get("name") in (None, *volumes):
                    yield f"{shown}.volumeMounts[{index}].name"


def containers_of(template: Mapping[Any, Any]) -> Iterator[Mapping[Any, Any]]:
    for kind in CONTAINERS:
        yield from template.get("spec", {}).get(kind) or ()
