"""Commands in the docs are found, every one has a form in which it is run or a reason why not, and options exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from dev.docs.check import all_commands, mistakes
from dev.docs.commands import DocCommand, commands_of, flags_of
from dev.docs.flags import bench_flags, splitserve_flags, wrong_alone, wrong_flags
from dev.docs.plan import NOT_RUN, SCENES, SHORT, fate_of, longest_beginning, unused

PAGE = """# A page

Text with `splitserve up --model NAME` in it, `--tls DIR` alone, a word like `splitserve`, and one that
goes `python -m bench.handoff
--json` on. `FUZZ=3 pytest tests` sets a variable.

    splitserve  up --prefill 1     # a comment
    echo "a # b" | splitserve generate - --json
    prefill: 2

    curl http://here -d '{
      "stream": true}'

```bash
grpcurl -plaintext \\
  127.0.0.1:50051 list
```

```
splitserve status
```

```python
make = "no command"
make all
```

A list:
    make nothing
"""


def found() -> list[DocCommand]:
    return commands_of("page.md", PAGE)


def test_commands_are_found_where_readers_see_them() -> None:
    assert [(command.line, command.text, command.in_block) for command in found()] == [
        (3, "splitserve up --model NAME", False),
        (4, "python -m bench.handoff --json", False),
        (5, "FUZZ=3 pytest tests", False),
        (7, "splitserve up --prefill 1", True),
        (8, 'echo "a # b" | splitserve generate - --json', True),
        (11, "curl http://here -d '{ \"stream\": true}'", True),
        (15, "grpcurl -plaintext 127.0.0.1:50051 list", True),
        (20, "splitserve status", True),
    ]


def test_variables_are_no_part_of_the_program() -> None:
    assert [command.words[0] for command in found() if "=" in command.text] == ["pytest"]


def test_flags_alone() -> None:
    assert flags_of(PAGE) == {"--tls"}


def test_a_command_that_goes_on_at_the_end_is_not_lost() -> None:
    assert [command.text for command in commands_of("page.md", "    make all \\")] == ["make all"]


@pytest.mark.parametrize(
    "text", ["splitserve up --prefill 99", "make fortune", "docker login", "curl http://there"]
)
def test_a_command_of_which_nobody_has_decided_is_a_mistake(text: str) -> None:
    command = DocCommand("page.md", 7, text, True)
    assert fate_of(command) is None
    assert f"page.md:7: {text}: nobody says how to run it" in mistakes([command])


def test_a_list_entry_without_a_command_is_a_mistake() -> None:
    everything = all_commands()
    assert not unused(everything)
    fewer = [command for command in everything if "bench.engine.grammar" not in command.text]
    assert unused(fewer) == {"python -m bench.engine.grammar"}


def test_the_longest_beginning_of_whole_words_decides() -> None:
    beginnings = ["python -m bench.engine", "python -m bench.engine --device cuda", "python -m bench.eng"]
    text = "python -m bench.engine --device cuda --json"
    assert longest_beginning(text, beginnings) == "python -m bench.engine --device cuda"
    assert longest_beginning("python -m bench.engine.growth", beginnings) is None


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("splitserve up --model NAME --grpc-port 0", None),
        ("splitserve certs DIR; splitserve up --tls DIR --colour", "`splitserve up --tls` has no --colour"),
        ("splitserve routes set a b=1 --target T --json", "`splitserve routes set` has no --json"),
        ("splitserve fortune", "there is no `splitserve fortune`"),
        ("python -m bench.handoff --lengths 16", None),
        ("python -m bench.handoff --depths 16", "`python -m bench.handoff` has no --depths"),
        ("python -m bench.fortune", "there is no module bench.fortune"),
    ],
)
def test_options_are_compared_with_the_programs(text: str, wrong: str | None) -> None:
    assert wrong_flags(DocCommand("page.md", 7, text, False)) == ([f"page.md:7: {wrong}"] if wrong else [])


def test_an_option_that_no_program_has(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text("With `--prefill 2` and `--prefix 2`, or `--lengths 16`.\n")
    command = DocCommand("README.md", 1, "python -m bench.handoff", False)
    assert wrong_alone(tmp_path, [command]) == ["README.md: no program has --prefix"]


def test_help_is_read_whole() -> None:
    assert {"--max-queued-requests", "--local-prefill"} <= splitserve_flags("coordinator")
    assert {"--json", "--help"} <= bench_flags("bench.engine")


def test_the_docs_have_no_mistakes() -> None:
    commands = all_commands()
    assert len(commands) > 100
    assert not mistakes(commands)


def test_every_form_that_is_run_has_options_that_exist() -> None:
    forms = list(SHORT.values())
    for scene in SCENES:
        for part in (scene.before, scene.servers, scene.clients):
            forms += [form.replace("{}", text) for text, form in part.items()]
    commands = [DocCommand("dev/docs/plan.py", 0, form, True) for form in forms]
    assert not [wrong for command in commands for wrong in wrong_flags(command)]
    assert all(NOT_RUN.values())
