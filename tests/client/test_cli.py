"""The command line: what it prints, where, and with which exit code."""

from __future__ import annotations

import io
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from ferrule import Client
from ferrule_cli.app import build_parser
from tests.client.command_line import run
from tests.client.fake_server import Failure, FakeServer

pytestmark = pytest.mark.usefixtures("target_variable")


def test_health_tells_by_words_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    """0 when it serves."""
    assert run("health") == 0
    text = capsys.readouterr().out
    assert text.startswith("serving: paged-reference on the processor, 0 live handles, ")
    assert text.endswith(" blocks free, instance test\n")
    assert run("health", "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["serving"] is True
    assert facts["instance"] == "test"
    assert (facts["device"], facts["dtype"]) == ("cpu", "float32")
    assert facts["device_name"]


def test_a_command_for_another_instance_does_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a proxy the name counts as well: nobody drains the wrong server."""
    for command in (("health",), ("admin", "drain"), ("admin", "shutdown"), ("top", "--once"), ("generate", "x")):
        assert run(*command, "--instance", "ferrule-q") == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        text = "the call is for instance 'ferrule-q', but this is 'test'; send it there (WRONG_INSTANCE)"
        assert captured.err == f"error: {text}\n"
    assert run("health", "--instance", "ferrule-q", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"serving": False, "reason": "WRONG_INSTANCE"}
    assert run("health", "--instance", "test") == 0


def test_a_proxy_that_refuses_is_told_from_a_server(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Its words, and the flag of the command line."""
    words = "several servers: name one by the metadata ferrule-instance"
    fake.failures["GetStatus"] = [Failure(grpc.StatusCode.PERMISSION_DENIED, words)]
    assert run("generate", "x", "--target", fake.target) == 1
    expected = f"error: the proxy refuses it ({words}): say --instance NAME, one that it knows (PERMISSION_DENIED)\n"
    assert capsys.readouterr().err == expected


def test_unreachable_server_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    """The flag wins over the environment."""
    assert run("health", "--target", "127.0.0.1:1") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    advice = 'start one with "ferrule serve", or name another with --target'
    expected = f"error: no server at 127.0.0.1:1 (connection refused); {advice} (CONNECTION_FAILED)\n"
    assert captured.err == expected
    assert captured.err.count("\n") == 1
    assert run("health", "--json", "--target", "127.0.0.1:1") == 1
    assert json.loads(capsys.readouterr().out) == {"serving": False, "reason": "CONNECTION_FAILED"}


def test_caches_lists_live_handles(capsys: pytest.CaptureFixture[str], client: Client) -> None:
    """By loggable id, as a table and as JSON."""
    with client.prefill(range(40)) as cache:
        assert run("caches") == 0
        table = capsys.readouterr().out
        assert cache.handle.handle_id in table
        assert "1 live handle," in table
        assert table.isascii()
        assert all(line == line.rstrip() and line for line in table.splitlines())
        assert table.split("\n")[1].split()[:4] == [cache.handle.handle_id, "40", "3", "0"]
        assert run("caches", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        (line,) = facts["caches"]
        assert facts["total_blocks"] - facts["free_blocks"] == 3
        assert (line["handle_id"], line["length"], line["num_blocks"]) == (cache.handle.handle_id, 40, 3)


def test_base_installation_lists_and_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without rich there are plain columns, on a terminal too; without the server there is advice that works."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert run("caches") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("handle  tokens  blocks  shared  durable  to run  lease  age\n0 live handles, ")
    assert captured.err == ""
    assert run("serve") == 2
    assert "pip install ferrule-server" in capsys.readouterr().err


def test_commands_start_without_rich(target: str) -> None:
    """Those that draw with it say so; the others are all there."""
    code = "import sys; sys.modules['rich'] = None; from ferrule_cli.app import main; sys.exit(main(sys.argv[1:]))"
    for command, exit_code in (("health", 0), ("--help", 0), ("top", 1), ("bench", 1)):
        more = [] if command == "--help" else ["--target", target]
        words = [sys.executable, "-c", code, command, *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == exit_code, done.stderr
    assert done.stderr.endswith("(RICH_MISSING)\n")


def test_table_in_colour_on_a_terminal(
    capsys: pytest.CaptureFixture[str], client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rich and a terminal the table is drawn."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    with client.prefill(range(40)) as cache:
        assert run("caches") == 0
        table = capsys.readouterr().out
    assert cache.handle.handle_id in table
    assert "─" in table


def test_generate_streams_token_ids(capsys: pytest.CaptureFixture[str], client: Client) -> None:
    """A model without a tokenizer takes and gives numbers; the same seed gives the same ones."""
    options = ("generate", "--ids", "--max-tokens", "5", "--seed", "3", "1 2,3")
    assert run(*options) == 0
    plain = capsys.readouterr().out
    assert run(*options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert plain.split() == [str(token) for token in facts["tokens"]]
    assert (facts["seed"], facts["finish_reason"], facts["num_prompt_tokens"]) == (3, "max_tokens", 3)
    assert list(client.list_caches()) == []


def test_generate_streams_text(
    fake: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt comes as an argument or on standard input."""
    options = ("generate", "--target", fake.target, "--max-tokens", "6")
    assert run(*options, "the") == 0
    assert capsys.readouterr().out == " quick\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("the quick"))
    assert run(*options, "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == " brown"
    assert fake.sequences == {}


def test_seeded_texts_come_of_the_whole_prompt(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """With a seed the prefix cache is left out, because its rounding could change the text the second time."""
    options = ("generate", "--target", fake.target, "--max-tokens", "2", "the")
    assert run(*options, "--seed", "7") == run(*options) == 0
    assert [request.cache.skip_prefix_reuse for request in fake.generates] == [True, False]


def test_drawn_seeds_are_exact_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Many a reader keeps 53 bits of a number; greedy has no seed."""
    options = ("generate", "--ids", "--max-tokens", "1", "1", "--json", "--n", "3")
    for _ in range(3):
        assert run(*options) == 0
        assert all(one["seed"] < 2**53 for one in json.loads(capsys.readouterr().out)["texts"])


def test_generate_tells_what_the_prefix_cache_had(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, beside the length of the prompt."""
    options = ("generate", "--ids", "--max-tokens", "1", "--json", " ".join(map(str, range(90, 130))))
    found = []
    for _ in range(2):
        assert run(*options) == 0
        found.append(json.loads(capsys.readouterr().out)["num_cached_tokens"])
    assert found == [0, 32]


def test_generate_without_a_tokenizer_names_the_flag(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a text nor a stop at one can be told to a model of bare ids."""
    assert run("generate", "hi") == 1
    said = capsys.readouterr().err
    assert "--ids" in said
    assert said.endswith("(FEATURE_UNSUPPORTED)\n")
    assert run("generate", "--ids", "1", "--stop", "x") == 1
    assert "--stop" in capsys.readouterr().err


@pytest.mark.parametrize("num_texts", [1, 2])
def test_generate_says_why_it_ended_early(capsys: pytest.CaptureFixture[str], client: Client, num_texts: int) -> None:
    """Where the context is full, on standard error; the text itself is all the same."""
    context = client.model_info().max_sequence_length
    prompt = " ".join(["1"] * (context - 4))
    assert run("generate", "--ids", "--temperature", "0", "--max-tokens", "600", "--n", str(num_texts), prompt) == 0
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert len(lines) == num_texts
    assert all(line.endswith(" of 600 tokens: the context of the model is full") for line in lines)
    assert run("generate", "--ids", "--max-tokens", "2", "1") == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("num_texts", [1, 2])
def test_generate_tells_the_likeliest_tokens(capsys: pytest.CaptureFixture[str], num_texts: int) -> None:
    """A line per token, or an entry in JSON, for each of the texts."""
    options = ("generate", "--ids", "--max-tokens", "3", "--top-logprobs", "2", "--n", str(num_texts), "1 2")
    assert run(*options) == 0
    assert len([line for line in capsys.readouterr().out.splitlines() if " | " in line]) == 3 * num_texts
    assert run(*options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    for one in facts.get("texts", [facts]):
        assert [entry["token"] for entry in one["logprobs"]] == one["tokens"]
        assert all(len(entry["top"]) == 2 and entry["logprob"] < 0 for entry in one["logprobs"])


def test_generate_tells_the_texts_of_the_likeliest_tokens(
    shipped_target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In JSON too, where a model has a tokenizer."""
    assert run("generate", "--target", shipped_target, "--json", "--max-tokens", "2", "--top-logprobs", "2", "x") == 0
    facts = json.loads(capsys.readouterr().out)
    assert all(isinstance(one["text"], str) for entry in facts["logprobs"] for one in (entry, *entry["top"]))


def test_generate_parses_special_tokens_on_demand(shipped_target: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Their text in a prompt is ordinary text otherwise."""
    counts = []
    for options in ((), ("--special-tokens",)):
        words = ("--target", shipped_target, "--json", "--max-tokens", "1", *options, "x<|endoftext|>")
        assert run("generate", *words) == 0
        counts.append(json.loads(capsys.readouterr().out)["num_prompt_tokens"])
    assert counts[0] > counts[1] == 2


def test_generate_draws_several_texts_and_stops(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """One after another for people, side by side in JSON; a text ends before its stop."""
    words = f"generate --target {fake.target} --n 2 --seed 5 --stop ck\\\\n --stop ick the --repetition-penalty 1.5"
    options = shlex.split(f"{words} --frequency-penalty 0.5 --presence-penalty 0.25")
    assert run(*options) == 0
    out = capsys.readouterr().out
    assert out == "--- 0, seed 5, stop_sequence\n qu\n--- 1, seed 6, stop_sequence\n qu\n"
    assert run(*options, "--json") == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["seed"] for one in facts["texts"]] == [5, 6]
    assert facts["text"] == facts["texts"][1]["text"] == " qu"
    assert fake.sequences == {}
    (request, _) = fake.generates
    assert list(request.stop_strings) == ["ck\n", "ick"]
    drawn = request.logits_policy.sample
    assert (drawn.repetition_penalty, drawn.frequency_penalty, drawn.presence_penalty) == (1.5, 0.5, 0.25)


def test_metrics_prints_counters(capsys: pytest.CaptureFixture[str], client: Client) -> None:
    """Of the pool and of the server, as lines and as JSON."""
    with client.prefill(range(40)):
        assert run("metrics") == 0
        lines = dict(line.split() for line in capsys.readouterr().out.splitlines())
        assert (lines["live_sequences"], lines["used_blocks"]) == ("1", "3")
        assert run("metrics", "--json") == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["used_blocks"] == 3
        assert facts["num_prefills"] >= 1


def test_admin_warms_up(capsys: pytest.CaptureFixture[str]) -> None:
    """And says what is warm."""
    assert run("admin", "warmup", "--batch-sizes", "2", "3") == 0
    assert capsys.readouterr().out.startswith("warm for batches of ")
    assert run("admin", "warmup", "--batch-sizes", "2", "--json") == 0
    assert 2 in json.loads(capsys.readouterr().out)["batch_sizes"]


def test_admin_drains_and_ends_a_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Drained, it refuses prompts and stays; shut down, it ends with 0."""
    listen = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "ferrule_server", "--executor", "paged-reference", "--kv-memory", "1MiB"]
    with subprocess.Popen([*command, "--listen", listen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        assert run("admin", "drain", "--grace", "9", "--target", listen) == 0
        assert capsys.readouterr().out == "draining: 0 live handles, 0 requests under way\n"
        assert run("generate", "--ids", "1", "--target", listen, "--timeout", "1") == 1
        assert "DRAINING" in capsys.readouterr().err
        assert process.poll() is None
        assert run("admin", "shutdown", "--grace", "0", "--target", listen) == 0
        assert capsys.readouterr().out == "ending: 0 live handles, served until the grace ends\n"
        assert process.wait(20) == 0


def test_generate_says_what_is_missing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No prompt, or one that holds no token ids."""
    assert run("generate", "--ids", "one two") == 2
    assert capsys.readouterr().err.endswith("(PROMPT_NOT_IDS)\n")
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda self: True})())
    assert run("generate") == 2
    capsys.readouterr()
    for prompt in ("", "  ", ","):
        assert run("generate", "--ids", prompt) == 2
        assert capsys.readouterr().err == "error: the prompt is empty (PROMPT_EMPTY)\n"
    assert run("generate", "--ids", "1 256") == 2
    assert "token 256 is not in the vocabulary of 256 tokens" in capsys.readouterr().err
    assert run("generate", "--ids", "99999999999") == 2
    assert capsys.readouterr().err.endswith("(PROMPT_NOT_IDS)\n")


def test_prompt_that_is_no_text_is_wrong_use(fake: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """Stray bytes on standard input or in an argument are said in one line."""
    command = [sys.executable, "-m", "ferrule_cli.app", "generate", "--target", fake.target]
    for handling in ("strict", "surrogateescape"):  # which it is depends on the locale
        environment = os.environ | {"PYTHONIOENCODING": f"utf-8:{handling}"}
        done = subprocess.run(command, input=b"\xff\xfe", capture_output=True, check=False, env=environment)
        assert done.returncode == 2
        assert done.stderr == b"error: the prompt is no text in UTF-8 (PROMPT_NOT_TEXT)\n"
    assert run("generate", "--target", fake.target, "a\udcff") == 2
    assert "no text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_ended_generate_releases_its_cache(target: str, client: Client, number: signal.Signals) -> None:
    """Whoever ends the command ends the sequence too."""
    command = [sys.executable, "-m", "ferrule_cli.app", "generate", "--ids", "--max-tokens", "400", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 128 + number
        assert errors == b""
    assert list(client.list_caches()) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("polish", ""),
        ("halth", "did you mean health?"),
        ("caches x", "'x'"),
        ("admin dance", ""),
        ("admin drain --batch-sizes 3", "--batch-sizes"),
        ("admin warmup --grace 5", "--grace"),
        ("admin drain --grce 5", "did you mean --grace?"),
        ("generate --max-tokns 5 x", "did you mean --max-tokens?"),
        ("generate --max-tokns=5 x", "did you mean --max-tokens?"),
        ("generate --max-tokens 0 x", "at least 1"),
        ("generate --top-p 1.5 x", "1.5"),
        ("generate --top-p 0 x", "0"),
        ("generate --seed -1 x", "-1"),
        (f"generate --seed {2**64} x", str(2**64 - 1)),
        ("generate --stop '' x", "at least one character"),
        ("health --target localhost", "host:port"),
        ("health --target 127.0.0.1:70000", "65535"),
        ("health --target http://127.0.0.1:50051", "host:port"),
        ("health --timeout soon", "soon"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says what was meant; the usage is one command away."""
    assert run(*shlex.split(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert said in captured.err
    assert captured.err.endswith(("(USED_WRONGLY)\n", "(TARGET_INVALID)\n"))
    assert captured.err.count("\n") == 1


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """It lists the commands and the first steps; a script learns that it has done nothing."""
    assert run() == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (build_parser().format_help(), "")


def test_wrong_environment_is_wrong_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings from the environment are checked as flags are."""
    monkeypatch.setenv("FERRULE_TIMEOUT", "soon")
    assert run("health") == 2
    assert run("health", "--timeout", "5") == 0


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is that of the package."""
    assert run("--version") == 0
    assert capsys.readouterr().out == "ferrule 0.1.0\n"


def test_plain_text_token_beyond_this_machine_warns() -> None:
    """A token must not travel unprotected unnoticed."""
    with pytest.warns(UserWarning, match="plain text"):
        Client("example.invalid:1", token="s3cret").close()
    Client("localhost:1", token="s3cret").close()
    Client("unix:/x", token="s3cret").close()
    Client("example.invalid:1", token="s3cret", tls=True).close()


def test_serve_ends_by_sigterm(tmp_path: Path) -> None:
    """SIGTERM reaches the server itself: no wrapper in between."""
    command = [sys.executable, "-m", "ferrule_cli.app", "serve", "--executor", "paged-reference"]
    listen = ["--listen", f"unix:{tmp_path}/s", "--kv-memory", "1MiB"]
    with subprocess.Popen([*command, *listen], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(b"ready")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_reader_that_leaves_early_is_no_traceback(target: str) -> None:
    """``ferrule generate | head`` ends quietly."""
    shell = f"{sys.executable} -m ferrule_cli.app generate --ids --max-tokens 200 1 | head -c 5"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr == ""
    with Client(target) as client:
        assert list(client.list_caches()) == []
