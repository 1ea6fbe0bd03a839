"""What an operator can type is documented and tried: every command and setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import CliRunner

from tests.docs.test_reference import DOCS, ROOT, commands
from tests.support.program import program
from thunderagent import cli
from thunderagent.cli import app
from thunderagent.cli.examples import EXAMPLES, words_of
from thunderagent.settings import PREFIX, Settings

TOLD: Final = "\n".join(
    page.read_text(encoding="utf-8")
    for page in sorted(DOCS.rglob("*.md"))
    if page.name not in ("settings.md", "commands.md")
)
"""All pages but the two that name every setting and command anyway."""

TESTS: Final = {
    path: path.read_text() for path in sorted((ROOT / "tests").rglob("*.py")) if path != Path(__file__).resolve()
}

FEW_MEET: Final = {
    "rebalance_s": "a pace that nobody needs to change",
    "connect_concurrency": "a pace that nobody needs to change",
    "batch_page": "a size that nobody needs to change",
}
"""Settings that stand in the reference alone, and why."""


COMMANDS: Final = commands()
each_command: Final = pytest.mark.parametrize("words", COMMANDS)


def options_of(words: str) -> set[str]:
    return {option for parameter in COMMANDS[words].params for option in parameter.opts}


@each_command
def test_every_command_has_help_with_an_example_of_itself(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "200"}).stdout
    assert COMMANDS[words].help, f"{words} has no help"
    assert f"$ thunderagent {words}" in shown, f"add an example of `{words}` to thunderagent/cli/examples.py"


@pytest.mark.parametrize("example", [one for lines in EXAMPLES.values() for one in lines])
def test_every_example_is_a_command_with_options_that_it_has(example: str) -> None:
    command: Any = program()
    context, arguments = None, words_of(example)
    name: str | None = "thunderagent"
    while hasattr(command, "commands") and arguments and arguments[0] in command.commands:
        context = command.make_context(name, [arguments[0]], parent=context, resilient_parsing=True)
        name, command, arguments = arguments[0], command.commands[arguments[0]], arguments[1:]
    command.make_context(name, list(arguments), parent=context)


def test_the_help_of_the_program_says_of_each_command_what_its_own_help_begins_with() -> None:
    begins = {name: " ".join(one.help.split("\n\n")[0].split()) for name, one in program().commands.items()}
    assert {name: sentence for name, (_, sentence) in cli.COMMANDS.items()} == begins


def test_every_example_belongs_to_a_command() -> None:
    groups = {words.rpartition(" ")[0] for words in COMMANDS}
    assert set(EXAMPLES) - set(COMMANDS) - groups == set()


@each_command
def test_every_command_has_a_json_form(words: str) -> None:
    assert "--json" in options_of(words)


@each_command
def test_every_command_is_in_a_page_that_says_when_to_use_it(words: str) -> None:
    assert re.search(rf"thunderagent {re.escape(words)}(?![\w-])", TOLD), f"`thunderagent {words}` is in no guide"


@each_command
def test_every_command_is_run_by_a_test(words: str) -> None:
    first, _, second = words.partition(" ")
    adjacent = r'",\s*"'.join(words.split())
    runs = re.compile(rf'[\[(]\s*(?:\w+,\s*)?"{adjacent}"')
    through = re.compile(rf'"{first}",\s*\*'), re.compile(rf'[\[(]\s*"{second}"')
    assert any(
        runs.search(text) or (second and through[0].search(text) and through[1].search(text)) for text in TESTS.values()
    ), f"no test runs `thunderagent {words}`"


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_in_a_page_that_says_when_to_change_it(name: str) -> None:
    is_told = bool(re.search(rf"{PREFIX}{name.upper()}\b|`{name}(?:[` =]|$)", TOLD))
    if name in FEW_MEET:
        assert not is_told, f"{name} is no exception any more"
    else:
        assert is_told, f"{name} is in no guide"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["exlpain"], "explain"),
        (["doctr"], "doctor"),
        (["streams", "lst"], "list"),
        (["stats", "--jsn"], "--json"),
        (["top", "--evry", "5"], "--every"),
    ],
    ids=" ".join,
)
def test_a_typing_error_is_answered_with_what_was_meant(typed: list[str], meant: str) -> None:
    answer = CliRunner().invoke(app, typed, env={"COLUMNS": "120"})
    assert answer.exit_code == 2
    assert answer.stdout == ""
    assert meant in answer.stderr
