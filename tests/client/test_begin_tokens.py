"""Prompts begin as the model's tokenizer begins a text, so that they are continued as ``transformers`` does it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

from ferrule import Client, greedy
from ferrule.types import Prompt
from tests.client.test_special_tokens import WAYS

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
SPECIAL = ["<bos>", "<eos>", "[gMASK]", "<sop>"]
AROUND = {"gemma": "<bos> $A", "appends eos": "<bos> $A <eos>", "glm": "[gMASK] <sop> $A"}
"""Post-processors, by what has one like it."""
TEXT = "The capital of France is"
NUM_DRAWN = 24
WITHOUT = ("Cache.append", "Cache.generate", "Cache.verify", "Stream.branch", "Append", "Verify")
"""Calls that continue a text, which has begun already."""


@dataclass(frozen=True)
class Served:
    """A served model, as transformers has it too.

    Attributes:
        begin: The token ids before a text.
        num_after: How many there are after one.
    """

    address: str
    model: Any
    tokenizer: Any
    begin: list[int]
    num_after: int

    def ids(self, text: str) -> list[int]:
        """Return what transformers makes of a prompt, without what it puts after one."""
        ids: list[int] = self.tokenizer(text)["input_ids"]
        return ids[: len(ids) - self.num_after]


def _write(folder: Path, around: str) -> Any:
    """Write a random Llama with a tokenizer of bytes into a folder, and return it."""
    inner = tokenizers.Tokenizer(models.BPE({letter: i for i, letter in enumerate(ALPHABET)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    ids = [(name, inner.token_to_id(name)) for name in SPECIAL]
    inner.post_processor = processors.TemplateProcessing(single=around, special_tokens=ids)
    inner.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=inner.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.3,
    )
    model: Any = transformers.LlamaForCausalLM(config)
    model.eval().save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=AROUND)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of such a model, in float32."""
    folder, around = tmp_path_factory.mktemp("model"), AROUND[request.param]
    model, address = _write(folder, around), f"unix:{folder}/ferrule.sock"
    command = [sys.executable, "-m", "ferrule_server", "--model", str(folder), "--executor", "torch"]
    command += ["--dtype", "float32", "--listen", address, "--kv-memory", "4MiB"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    with process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready"), (folder / "server.log").read_text()
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(str(folder))
        before, _, after = around.partition("$A")
        begin = [256 + SPECIAL.index(name) for name in before.split()]
        yield Served(address, model, tokenizer, begin, len(after.split()))
        process.terminate()
        assert process.wait(20) == 0


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A client of it; the test must leave no sequence behind."""
    with Client(served.address, timeout=30) as client:
        yield client
        assert list(client.list_caches()) == []


def test_a_text_is_continued_as_transformers_does_it(served: Served, client: Client) -> None:
    """Greedy tokens are the same, and others than without what stands before the text."""
    ids = served.ids(TEXT)
    assert ids[: len(served.begin)] == served.begin
    with torch.no_grad():
        drawn = served.model.generate(torch.tensor([ids]), max_new_tokens=NUM_DRAWN, do_sample=False)
    expected = drawn[0, len(ids) :].tolist()
    assert client.generate(TEXT, NUM_DRAWN, policy=greedy()).read().tokens == expected
    with client.prefill(TEXT, policy=greedy()) as cache:
        assert cache.token_ids == ids
        assert cache.generate(NUM_DRAWN - 1, policy=greedy()).read().tokens == expected[1:]
    alone = client.generate(TEXT, NUM_DRAWN, policy=greedy(), add_special_tokens=False).read()
    assert alone.tokens != expected


def test_a_text_is_scored_as_transformers_does_it(served: Served, client: Client) -> None:
    """The log-probabilities, of the first token of the text too."""
    ids = torch.tensor([served.ids(TEXT)])
    with torch.no_grad():
        rows = torch.log_softmax(served.model(ids).logits[0, :-1], -1)
    expected = rows.gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(client.score(TEXT), expected, atol=1e-4)
    assert len(client.score(TEXT, add_special_tokens=False)) == len(expected) - len(served.begin)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_begin_and_other_texts_do_not(served: Served, client: Client, way: str) -> None:
    """In every call that takes a text; lists of tokens are never changed."""
    plain = client.tokenize(TEXT)

    def result(tokens: list[int] | str, **options: Any) -> list[Any]:
        with client.prefill([7]) as cache:
            return WAYS[way](client, cache, tokens, **options)

    if way in WITHOUT:
        assert result(TEXT) == result(plain)
        return
    whole = served.tokenizer(TEXT)["input_ids"]  # an embedded text does not continue, so it has its end
    assert result(TEXT) == result(whole if way == "Client.embed" else [*served.begin, *plain])
    assert result(TEXT, add_special_tokens=False) == result(plain)
    assert result(plain) != result(TEXT)
    assert result(plain, add_special_tokens=True) == result(plain)


def test_a_prompt_that_writes_its_begin_token_out_has_it_once(served: Served, client: Client) -> None:
    """Where its text is parsed."""
    written = served.tokenizer.decode(served.begin) + TEXT
    with client.prefill(written, parse_special_tokens=True) as cache:
        assert cache.token_ids == served.ids(TEXT)
    with client.stream() as stream, stream.run([Prompt(written)])[0] as cache:
        assert cache.token_ids == served.begin + client.tokenize(written)


def test_tokenize_adds_what_it_is_told_to(served: Served, client: Client) -> None:
    """Nothing, what stands before a text, or all that stands around one."""
    plain = client.tokenize(TEXT)
    assert served.tokenizer(TEXT)["input_ids"] == client.tokenize(TEXT, add_special_tokens=True)
    assert client.tokenize(TEXT, add_special_tokens="begin") == [*served.begin, *plain]
    assert client.tokenize("", add_special_tokens="begin") == served.begin
    with pytest.raises(ValueError, match="add_special_tokens must be one of"):
        client.tokenize(TEXT, add_special_tokens="end")  # type: ignore[arg-type]


def test_the_command_begins_a_prompt_too(served: Served) -> None:
    """Unless it is told not to."""
    numbers = []
    for options in ([], ["--no-begin-tokens"]):
        command = [sys.executable, "-m", "ferrule_cli.app", "generate", "--target", served.address, "--json", *options]
        command += ["--max-tokens", "2", "--temperature", "0", TEXT]
        numbers.append(json.loads(subprocess.check_output(command))["num_prompt_tokens"])
    assert numbers == [len(served.ids(TEXT)), len(served.ids(TEXT)) - len(served.begin)]
