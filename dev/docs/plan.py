"""What `make docs-check` does with each command of the docs: run it as it is or in a short form, or say why not.

A command is looked up by its text, then by the longest beginning that is listed. Commands of `splitserve` inside text
are mentions: their options are checked, and they are not run. One that fits nothing is an error, as is an entry of
these lists that fits no command any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dev.docs.commands import DocCommand

PORTS = "--grpc-port 50051 --http-port 8000"
TINY = "--engine simulated --model simulated"
CERTS = "splitserve certs certs/ --host my.host.example"
ROUTE = "--model-route smollm2=smollm2-v1:95,smollm2-v2:5"


@dataclass(frozen=True)
class Scene:
    """Servers that run together, the commands run against them, and those run before they start.

    A value is what is run in place of the documented command, with `{}` for that command itself.
    """

    name: str
    before: Mapping[str, str]
    servers: Mapping[str, str]
    clients: Mapping[str, str]

    @property
    def texts(self) -> list[str]:
        """The documented commands."""
        return [*self.before, *self.servers, *self.clients]


def _as_they_are(*texts: str) -> dict[str, str]:
    return dict.fromkeys(texts, "{}")


_CHAT = (
    "curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' -d '{ "
    '"model": "smollm2-135m-instruct", '
)
_ASK = '"messages": [{"role": "user", "content": "What is the name of the capital of France?"}]'
_CURL = "{} --fail --silent --show-error"

_FIRST = """import json, sys; print(json.load(sys.stdin)["requests"][0]["request_id"])"""
_EXPLAIN = f"splitserve explain $(splitserve explain --json | python -c '{_FIRST}')"

SCENES = (
    Scene(
        "quickstart/cpu.md: one command for all, with observability.md",
        _as_they_are("source .venv/bin/activate"),
        {
            "splitserve up --model smollm2-135m-instruct --prefill 1 --decode 1": (
                "{} --request-log requests.jsonl " + PORTS
            )
        },
        {
            **_as_they_are(
                'splitserve generate "What is the name of the capital of France?"',
                'splitserve generate "Write a haiku about rain." --temperature 0.8 --seed 7 --timings',
                'splitserve generate "Once upon a time" --raw --max-tokens 40',
                'echo "Explain KV caches in one sentence." | splitserve generate - --json',
                "splitserve status",
                'splitserve generate "Pick a colour." --regex "red|green|blue"',
                "splitserve explain --slow",
                "splitserve explain --failed",
                "splitserve doctor",
                "splitserve explain",
            ),
            "splitserve plan --target 127.0.0.1:50051 --trace requests.jsonl --scale 4": (
                'for n in 1 2 3 4 5 6 7 8 9 10 11 12; do splitserve generate "Say $n." --max-tokens 24; done'
                " && {} --limit 20"
            ),
            "splitserve top": "{} --count 1 --interval 1",
            "splitserve top --count 1 --json": "{} --interval 1",
            "splitserve top --ttft 0.5 --tpot 0.05 --target host-a:50051,host-b:50051": (
                "splitserve top --count 1 --interval 1 --ttft 0.5 --tpot 0.05"
            ),
            "splitserve explain REQUEST_ID": _EXPLAIN,
            "splitserve explain REQUEST_ID --json": f"{_EXPLAIN} --json",
            'splitserve generate "Describe a cat." --json-schema cat.json': "{} --max-tokens 60",
            _CHAT + '"stream": true, "max_tokens": 40, ' + _ASK + "}'": _CURL,
        },
    ),
    Scene(
        "openai-api.md: the default model",
        {},
        {"splitserve up": "{} " + PORTS},
        {_CHAT + _ASK + ', "stream": true }\'': _CURL},
    ),
    Scene(
        "observability.md: tracing, with no receiver there",
        {},
        {"splitserve up --tracing-endpoint http://localhost:4317 --trace-sample-ratio 0.1": "{} " + PORTS},
        {},
    ),
    Scene(
        "quickstart/cpu.md: each service by itself, with model routes",
        {},
        {
            "splitserve coordinator --grpc-port 50051": "{} --http-port 0 " + ROUTE,
            "splitserve prefill-worker --model smollm2-135m-instruct --coordinator 127.0.0.1:50051": "{}",
            "splitserve decode-worker --model smollm2-135m-instruct --coordinator 127.0.0.1:50051": "{}",
        },
        _as_they_are(
            "splitserve routes show",
            "splitserve routes set smollm2 smollm2-v1=80 smollm2-v2=20",
            "splitserve routes rollback smollm2",
            "splitserve routes remove smollm2",
        ),
    ),
    Scene(
        "quickstart/cpu.md: with TLS and tenants",
        _as_they_are(CERTS, "splitserve keys new", "splitserve keys init keys"),
        {"splitserve up --tls certs/ --tenants tenants.yaml": "{} " + PORTS + " " + TINY},
        {'splitserve generate "Hello" --tls certs/ca.pem --target front.example:50051': "{} --max-tokens 4"},
    ),
    Scene(
        "security.md: each part with its certificate",
        {CERTS: "{} --force"},
        {
            "splitserve coordinator --tls certs --host 0.0.0.0": "{} --grpc-port 50051 --http-port 0",
            "splitserve decode-worker --tls certs --coordinator front.example:50052 ...": "{} " + TINY,
            "splitserve autoscaler --tls certs --coordinator front.example:50052 --policy policy.yaml": "{}",
        },
        {},
    ),
)

_PLAN = (
    "splitserve plan --model smollm2-135m-instruct --gpu L4 --rate 40 --prompt-tokens p50=800,p95=2500"
    " --output-tokens 250 --slo-ttft 1000 --slo-tpot 40"
)
SHORT: Mapping[str, str] = {
    "make docs": "make docs",
    "make proto": "make proto",
    "splitserve simulate --trace azure_2023_conv.csv": (
        "splitserve simulate --trace azure_2023_conv.csv --policy policy.yaml --engine-preset h100x4-70b"
        " --cold-start 60"
    ),
    "splitserve simulate --trace diurnal": (
        "cp policy.yaml other.yaml;"
        " splitserve simulate --trace diurnal --policy policy.yaml --policy other.yaml --duration 300"
    ),
    _PLAN: _PLAN,
    "splitserve up --help": "splitserve up --help",
    "splitserve demo": "splitserve demo",
    "splitserve health --tls DIR": "splitserve health --help",
    "python -m bench.autoscaling": (
        "python -m bench.autoscaling --quick --starts 60s --no-baselines"
        " --json > bars.json || grep -q '\"bars\"' bars.json"
    ),
    "python -m bench.chaos": "python -m bench.chaos --minutes 0.2 --prompts 4 --json",
    "python -m bench.observability.observation_cost": (
        "python -m bench.observability.observation_cost --turns 1 --seconds 0.5 --json"
    ),
    "python -m bench.autoscaling.from_zero": (
        "python -m bench.autoscaling.from_zero --model simulated --rounds 1 --interval 1 --json > zero.json"
        " || grep -q '\"ratio\"' zero.json"
    ),
    "python -m bench.front_door": "python -m bench.front_door --parts tokens --entrypoints sse --seconds 0.3 --json",
    "python -m bench.observability.page_cost": (
        "python -m bench.observability.page_cost --workers 4 --requests-per-s 5 --rounds 1 --seconds 0.5 --json"
    ),
    "python -m bench.engine": (
        "python -m bench.engine --threads 1 --phase decode --batch 1 --context 128 --logs engine-logs --json"
    ),
    "python -m bench.engine.growth": "python -m bench.engine.growth --json",
    "python -m bench.engine.step_layout": "python -m bench.engine.step_layout --steps 17 --json",
    "python -m bench.engine.grammar": "python -m bench.engine.grammar --batches 1 --json",
    "python -m bench.engine.schemas": "python -m bench.engine.schemas --count 20",
    "python -m bench.output_formats": "python -m bench.output_formats",
    "python -m bench.goodput": (
        "python -m bench.goodput --quick --systems default --requests 4 --runs goodput-runs.jsonl --json"
    ),
    "python -m bench.handoff": "python -m bench.handoff --repeats 1 --lengths 16 --json",
    "python -m dev.gpu_check": "python -m dev.gpu_check || test $? -eq 2",
    "python -m dev.gpu_vllm": "python -m dev.gpu_vllm || test $? -eq 2",
    "python -m bench.routing": "python -m bench.routing --workers 10 --blocks 10000 --decisions 100",
    "python -m bench.routing.trace": (
        "python -m bench.routing.trace --trace mooncake_conversation.jsonl --requests 20 --json > bars.json"
        " || grep -q '\"rows\"' bars.json"
    ),
    "python -m bench.autoscaling.simulated_vs_real": (
        "python -m bench.autoscaling.simulated_vs_real --trace azure_2023_conv.csv --requests 4 --max-output 8"
        " --evaluations 20"
    ),
    "python -m bench.handoff.checksums": "python -m bench.handoff.checksums --json",
}
"""Run once, by what they begin with. Bench commands need a few seconds in these forms. Two of them fail where their
bars are not reached, which so few requests cannot; that they report is enough here."""

_BY_CI = "a step of CI itself, which calls it beside this check"
_DOCKER = "needs a Docker Engine and its images; `make e2e-docker` runs the compose file"
_NETWORK = "needs a package index that not every machine reaches"
_PEER = "needs an environment of another project's, which not every machine can install"
_CLIENT = "needs a program that is no dependency of splitserve"
NOT_RUN: Mapping[str, str] = {
    "make demo": _BY_CI,
    "make test": _BY_CI,
    "make test-all": _BY_CI,
    "make check": _BY_CI,
    "make e2e-docker": _BY_CI,
    "make docs-check": "this check itself",
    "make docs-site": "a step of CI itself; it needs the extra `docs`",
    "make setup": "run by each of CI's steps",
    "make wheels": _NETWORK,
    "make release": "tests/integration/wheel makes the same files",
    "make peer-vllm": _PEER,
    "python -m bench.faults": "tests/integration/failures and tests/integration/transfer run it",
    "make peer-dynamo": _PEER,
    "make setup-vllm": _BY_CI,
    "make test-vllm": _BY_CI,
    "make test-wheel": _BY_CI,
    "make test-vllm-all": _PEER,
    "splitserve up --engine vllm": _PEER,
    "python -m bench.peers.vllm_pair": _PEER,
    "python -m bench.vllm": _PEER,
    "pip install": _NETWORK,
    "cd compose": _DOCKER,
    "docker compose": _DOCKER,
    "splitserve autoscaler explain --target 127.0.0.1:9464": (
        "needs an autoscaler's port; tests/integration/scaling/test_autoscaler_service.py runs it"
    ),
    "splitserve up --autoscale": "tests/integration/scaling runs it",
    "splitserve up --batch-folder": "tests/integration/entrypoints/test_batches.py runs it",
    "splitserve autoscaler --policy policy.yaml --actuator docker": _DOCKER,
    "python -m dev.docs.request_path": "tests/integration/cluster/test_request_path.py runs it",
    "docker build": _DOCKER,
    "docker push": "needs a registry of images",
    "helm": "needs a Kubernetes cluster; tests/unit/autoscaler/actuators/test_chart.py renders the chart",
    "kubectl": "needs a Kubernetes cluster",
    "curl --no-buffer": "needs a Kubernetes cluster",
    "grpcurl": _CLIENT
    + "; tests/integration/entrypoints/test_kserve.py and test_services.py make the same calls",
    "aiperf": _CLIENT,
    "guidellm": _CLIENT,
    "inference-perf": _CLIENT,
    "vllm bench serve": "tests/integration/vllm/test_vllm_bench.py runs it",
    "pytest": "`make test` runs these tests with fewer examples",
}
"""Reasons, by what the commands begin with."""

NO_COMMAND = frozenset({"splitserve ready"})
"""Code spans that only look like a command."""

FOREIGN_FLAGS = frozenset(
    [
        "--backend",
        "--endpoint",
        "--endpoint-type",
        "--build-arg",
        "--kv-offloading-size",
        "--max-loras",
        "--runner",
        "--speculative-config",
        "--max-lora-rank",
        "--max-cpu-loras",
        "--cap-add",
        "--ipc",
        "--ulimit",
        "--set",
        "--shm-size",
        "--values",
        "--speedup-ratio",
    ]
)
"""Options of other programs that the docs name outside commands."""


@dataclass(frozen=True)
class Fate:
    """How a command is treated: `entry` is the listed prefix, `run` the short form, `why_not` the reason to skip it."""

    entry: str
    run: str | None = None
    why_not: str | None = None


def fate_of(command: DocCommand) -> Fate | None:
    """What is done with a command; None where no entry fits it."""
    text = " ".join(command.words)
    if text in NO_COMMAND:
        return Fate(text, why_not="no command")
    if command.in_block and any(text in scene.texts for scene in SCENES):
        return Fate(text, run=text)
    beginning = longest_beginning(text, [*SHORT, *NOT_RUN])
    if beginning is not None:
        return Fate(beginning, run=SHORT.get(beginning), why_not=NOT_RUN.get(beginning))
    if text.startswith("splitserve ") and not command.in_block:
        return Fate("", why_not="a mention")
    return None


def longest_beginning(text: str, beginnings: Sequence[str]) -> str | None:
    """The longest listed prefix of whole words."""
    fitting = [beginning for beginning in beginnings if f"{text} ".startswith(f"{beginning} ")]
    return max(fitting, key=len, default=None)


def unused(commands: Sequence[DocCommand]) -> set[str]:
    """Entries without a command in the docs."""
    fates = [fate_of(command) for command in commands]
    listed = {*SHORT, *NOT_RUN, *NO_COMMAND} | {text for scene in SCENES for text in scene.texts}
    return listed - {fate.entry for fate in fates if fate is not None}
