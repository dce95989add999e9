"""A small Kubernetes API server over HTTP: pods and scale subresources, and what their controllers would do.

Only what the actuator calls is there. Anything else is 404, an unknown patch type 415, as on the real one.
"""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

MERGE = "application/merge-patch+json"
COST = "controller.kubernetes.io/pod-deletion-cost"
NAMESPACE = "serving"


@dataclass
class Workload:
    kind: str
    name: str
    replicas: int = 0
    version: int = 1
    limits: dict[str, str] = field(default_factory=dict)
    """`resources.limits` of its pods' container."""
    arguments: list[str] = field(default_factory=list)


@dataclass
class FakePod:
    name: str
    workload: Workload
    number: int
    annotations: dict[str, str] = field(default_factory=dict)
    phase: str = "Running"
    ready: bool = True
    deleting: bool = False
    arguments: list[str] = field(default_factory=list)
    """Of the workload when it was made; a rolling update makes new ones."""

    def _worker(self) -> dict[str, Any]:
        limits = {"resources": {"limits": self.workload.limits}} if self.workload.limits else {}
        return {"name": "worker", "args": self.arguments, **limits}

    def document(self) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": self.name,
            "namespace": NAMESPACE,
            "creationTimestamp": datetime.fromtimestamp(1_700_000_000 + self.number, UTC).isoformat(),
            "labels": {"app": self.workload.name},
            "annotations": self.annotations,
        }
        if self.deleting:
            metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        condition = {"type": "Ready", "status": "True" if self.ready else "False"}
        return {
            "metadata": metadata,
            "spec": {"containers": [self._worker()], "terminationGracePeriodSeconds": 130},
            "status": {"phase": self.phase, "conditions": [condition]},
        }


class FakeKubernetes:
    """State behind the server. With `prompt` the controllers act after each request, else when `control` is called."""

    def __init__(self, *workloads: Workload, prompt: bool = True) -> None:
        self.workloads = {(w.kind, w.name): w for w in workloads}
        self.pods: dict[str, FakePod] = {}
        self.prompt = prompt
        self.refuse: int | None = None
        """Status of every answer, while set."""
        self.odd: Any = None
        """The body of every answer, while set, with the status 200."""
        self.requests: list[tuple[str, str]] = []
        self.url = ""
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def control(self) -> None:
        """What controllers and kubelets do: make missing pods, delete those too many, end what was deleted."""
        for name in [pod.name for pod in self.pods.values() if pod.deleting]:
            del self.pods[name]
        for workload in self.workloads.values():
            alive = [p for p in self.pods.values() if p.workload is workload and p.phase == "Running"]
            for pod in sorted(alive, key=_deleted_first)[: max(0, len(alive) - workload.replicas)]:
                pod.deleting = True
            for _ in range(workload.replicas - len(alive)):
                self._make(workload)

    def vanish(self, name: str) -> None:
        """The pod's node dies."""
        self.pods[name].phase = "Failed"

    def _make(self, workload: Workload) -> None:
        number = next(self._numbers)
        name = f"{workload.name}-7c9f-{number:05d}"
        if workload.kind == "statefulset":
            taken = {pod.name for pod in self.pods.values()}
            name = next(n for n in (f"{workload.name}-{i}" for i in itertools.count()) if n not in taken)
        self.pods[name] = FakePod(name, workload, number, arguments=list(workload.arguments))

    def answer(self, method: str, path: str, query: str, kind: str, body: Any) -> tuple[int, Any]:
        with self._lock:
            self.requests.append((method, path))
            if self.refuse is not None:
                return self.refuse, _status(self.refuse, "the server says no")
            if self.odd is not None:
                return 200, self.odd
            if method == "PATCH" and kind != MERGE:
                return 415, _status(415, f"unsupported patch type {kind}")
            result = self._route(method, path, query, body)
            if self.prompt:
                self.control()
            return result

    def _route(self, method: str, path: str, query: str, body: Any) -> tuple[int, Any]:
        if found := re.fullmatch(rf"/apis/apps/v1/namespaces/{NAMESPACE}/(\w+)s/([^/]+)/scale", path):
            workload = self.workloads.get((found[1], found[2]))
            if workload is None:
                return 404, _status(404, f'{found[1]}s.apps "{found[2]}" not found')
            return self._scale(workload, body if method == "PATCH" else None)
        if path == f"/api/v1/namespaces/{NAMESPACE}/pods":
            label = re.fullmatch(r"labelSelector=app%3D([\w.-]+)", query)
            assert label, query
            items = [pod.document() for pod in self.pods.values() if pod.workload.name == label[1]]
            return 200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        found = re.fullmatch(rf"/api/v1/namespaces/{NAMESPACE}/pods/([^/]+)", path)
        pod = self.pods.get(found[1]) if found and method == "PATCH" else None
        if pod is None:
            return 404, _status(404, f"{path} not found")
        for key, value in body["metadata"]["annotations"].items():
            if value is None:
                pod.annotations.pop(key, None)
            else:
                pod.annotations[key] = value
        return 200, pod.document()

    def _scale(self, workload: Workload, patch: Any) -> tuple[int, Any]:
        if patch is not None:
            wanted = patch["metadata"].get("resourceVersion")
            if wanted is not None and wanted != str(workload.version):
                return 409, _status(409, "the object has been modified")
            workload.replicas = patch["spec"]["replicas"]
            workload.version += 1
        pods = sum(pod.workload is workload for pod in self.pods.values())
        return 200, {
            "kind": "Scale",
            "apiVersion": "autoscaling/v1",
            "metadata": {"name": workload.name, "resourceVersion": str(workload.version)},
            "spec": {"replicas": workload.replicas},
            "status": {"replicas": pods, "selector": f"app={workload.name}"},
        }


def _deleted_first(pod: FakePod) -> tuple[float, ...]:
    """The ReplicaSet controller's order: pods on their way out, not ready, by deletion cost, youngest. A StatefulSet's:
    highest ordinal."""
    if pod.workload.kind == "statefulset":
        return (-float(pod.name.rpartition("-")[2]),)
    return not pod.deleting, pod.ready, float(pod.annotations.get(COST, "0")), -pod.number


def _status(code: int, message: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": message}


@contextmanager
def serving_kubernetes(kubernetes: FakeKubernetes, folder: Path) -> Iterator[Path]:
    """Serves it on a free port; gives a kubeconfig that leads there."""

    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            path, _, query = self.path.partition("?")
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, document = kubernetes.answer(
                self.command, path, query, self.headers.get("Content-Type", ""), json.loads(raw or b"null")
            )
            data = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = _answer

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    kubernetes.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield _kubeconfig(folder / "kubeconfig", kubernetes.url)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _kubeconfig(path: Path, url: str) -> Path:
    context = {"cluster": "fake", "user": "nobody", "namespace": NAMESPACE}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "users": [{"name": "nobody", "user": {}}],
        "contexts": [{"name": "fake", "context": context}],
        "current-context": "fake",
    }
    path.write_text(yaml.safe_dump(document))
    return path
