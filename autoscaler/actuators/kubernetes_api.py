"""The Kubernetes API calls of the actuator, each with a deadline, off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from kubernetes import client, config
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError
from yaml import YAMLError

from splitserve.config.autoscaler import KubernetesConfig
from splitserve.errors import (
    ConfigError,
    FailedPreconditionError,
    NotFoundError,
    SplitserveError,
    UnavailableError,
)

CALL_S = 5.0
"""Deadline of one call to the API server: it answers within a second, and the control loop tries again at its next
tick."""
MERGE_PATCH = "application/merge-patch+json"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
"""Annotation of a pod. A ReplicaSet removes the pod with the lowest cost first.
https://kubernetes.io/docs/concepts/workloads/controllers/replicaset/#pod-deletion-cost"""
GPU_RESOURCES = ("nvidia.com/gpu", "nvidia.com/mig-")
"""Beginnings of the names that NVIDIA's device plugin gives to GPUs, shared GPUs (`nvidia.com/gpu.shared`) and MIG
slices."""
_ENDED = frozenset({"Succeeded", "Failed"})
_MALFORMED = (AttributeError, LookupError, TypeError, ValueError)
"""What the client raises over answers and files that do not have the expected form."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scale:
    """A workload's scale subresource."""

    replicas: int
    selector: str
    """Label selector of its pods."""
    version: str
    """Resource version. The API server refuses changes that are based on an older one."""


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod that has not ended."""

    name: str
    created_wall_s: float
    deleting: bool
    ready: bool
    chosen: bool
    """It is marked to be removed first."""
    grace_s: float
    """Termination grace period, seconds."""
    gpus: int = 0
    """GPUs or MIG slices that its first container is limited to."""
    command: tuple[str, ...] = ()
    """Its first container's command and arguments."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Its first container's variables with a plain value."""


class KubernetesApi:
    """Calls in one namespace. They raise NotFoundError, FailedPreconditionError (FORBIDDEN) or UnavailableError with
    the server's message."""

    def __init__(self, settings: KubernetesConfig) -> None:
        configuration, namespace = _load(settings)
        configuration.retries = False  # the control loop retries at its next tick
        self._client = client.ApiClient(configuration)
        self._core, self._apps = client.CoreV1Api(self._client), client.AppsV1Api(self._client)
        self.namespace = namespace

    async def scale(self, workload: str) -> Scale:
        """The scale of "deployment/NAME" or "statefulset/NAME"."""
        kind, _, name = workload.partition("/")
        read = {
            "deployment": self._apps.read_namespaced_deployment_scale,
            "statefulset": self._apps.read_namespaced_stateful_set_scale,
        }[kind]
        return await self._read(workload, _scale, read, name, self.namespace)

    async def set_replicas(self, workload: str, replicas: int, version: str) -> None:
        """Sets the replica count, unless the workload's scale has changed since `version`."""
        kind, _, name = workload.partition("/")
        patch = {
            "deployment": self._apps.patch_namespaced_deployment_scale,
            "statefulset": self._apps.patch_namespaced_stateful_set_scale,
        }[kind]
        body = {"metadata": {"resourceVersion": version}, "spec": {"replicas": replicas}}
        await self._call(workload, patch, name, self.namespace, body, _content_type=MERGE_PATCH)

    async def pods(self, selector: str) -> list[Pod]:
        """The pods with these labels that have not ended, in order of their names."""
        what, read = f"pods with {selector}", self._core.list_namespaced_pod
        pods = await self._read(what, _pods, read, self.namespace, label_selector=selector)
        return sorted(pods, key=lambda pod: pod.name)

    async def set_deletion_cost(self, pod: str, cost: int | None) -> None:
        """Sets a pod's deletion cost; None removes it. A missing pod is no error."""
        annotations = {DELETION_COST: None if cost is None else str(cost)}
        body = {"metadata": {"annotations": annotations}}
        try:
            await self._call(
                pod, self._core.patch_namespaced_pod, pod, self.namespace, body, _content_type=MERGE_PATCH
            )
        except NotFoundError:
            return

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    async def _read(
        self, what: str, of: Callable[[Any], T], call: Callable[..., Any], *arguments: Any, **options: Any
    ) -> T:
        """The answer, read by `of`."""
        answer = await self._call(what, call, *arguments, **options)
        with _refusing_malformed(what):
            return of(answer)

    async def _call(self, what: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        options["_request_timeout"] = CALL_S
        try:
            with _refusing_malformed(what):
                return await asyncio.to_thread(call, *arguments, **options)
        except client.ApiException as error:
            raise _error_of(what, error) from None
        except HTTPError as error:
            message = f"kubernetes: {what}: {error}"
            raise UnavailableError(message, reason="KUBERNETES_UNREACHABLE") from None


def _load(settings: KubernetesConfig) -> tuple[client.Configuration, str]:
    """How to reach the API server, and the namespace."""
    configuration = client.Configuration()
    file = str(settings.kubeconfig) if settings.kubeconfig else None
    if file is None and settings.context is None:
        with suppress(ConfigException):  # not in a pod
            config.load_incluster_config(configuration)
            own = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
            return configuration, settings.namespace or own.read_text(encoding="utf-8").strip()
    try:
        config.load_kube_config(file, settings.context, configuration)
        contexts, current = config.list_kube_config_contexts(file)
        chosen = next((context for context in contexts if context["name"] == settings.context), current)
        return configuration, settings.namespace or chosen["context"].get("namespace") or "default"
    except (ConfigException, OSError) as error:
        raise ConfigError(f"kubernetes.kubeconfig: {error}", field="kubernetes.kubeconfig") from None
    except (YAMLError, *_MALFORMED) as error:
        message = f"kubernetes.kubeconfig: not a kubeconfig: {error!r:.500}"
        raise ConfigError(message, field="kubernetes.kubeconfig") from None


@contextmanager
def _refusing_malformed(what: str) -> Iterator[None]:
    """Turns a malformed answer, such as a proxy's page, into UnavailableError: the control loop tries again."""
    try:
        yield
    except _MALFORMED as error:
        message = f"kubernetes: {what}: not an answer of an API server: {error!r:.500}"
        raise UnavailableError(message, reason="KUBERNETES_FAILED") from error


def _scale(answer: Any) -> Scale:
    return Scale(answer.spec.replicas or 0, answer.status.selector, answer.metadata.resource_version)


def _pods(answer: Any) -> list[Pod]:
    return [_pod(item) for item in answer.items if item.status.phase not in _ENDED]


def _pod(item: Any) -> Pod:
    conditions = item.status.conditions or ()
    worker = item.spec.containers[0]
    limits: Mapping[str, str] = (worker.resources.limits if worker.resources else None) or {}
    return Pod(
        name=item.metadata.name,
        created_wall_s=item.metadata.creation_timestamp.timestamp(),
        deleting=item.metadata.deletion_timestamp is not None,
        ready=any(condition.type == "Ready" and condition.status == "True" for condition in conditions),
        chosen=DELETION_COST in (item.metadata.annotations or {}),
        grace_s=float(item.spec.termination_grace_period_seconds or 0),
        gpus=sum(int(count) for name, count in limits.items() if name.startswith(GPU_RESOURCES)),
        command=(*(worker.command or ()), *(worker.args or ())),
        environment={entry.name: entry.value for entry in worker.env or () if entry.value is not None},
    )


def _error_of(what: str, error: client.ApiException) -> SplitserveError:
    detail = error.reason
    with suppress(ValueError, KeyError, TypeError):  # the body is no Status object
        detail = json.loads(error.body)["message"]
    message = f"kubernetes: {what}: {error.status} {detail}"
    match error.status:
        case 404:
            return NotFoundError(message)
        case 401 | 403:
            return FailedPreconditionError(message, reason="FORBIDDEN")
        case 409:
            return UnavailableError(message, reason="CHANGED_MEANWHILE")
    return UnavailableError(message, reason="KUBERNETES_FAILED")
