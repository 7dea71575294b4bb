"""``ferrule check`` and ``ferrule models``: what they say is what a server does, and no weights are fetched for it."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from ferrule_cli import app
from ferrule_server import loading
from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError
from ferrule_server.executor.cpu import weights as packing
from ferrule_server.executor.cpu.support import choose
from ferrule_server.executor.devices import Device
from ferrule_server.executor.sizes import active_bytes, num_parameters
from ferrule_server.loading import create_executor
from ferrule_server.model.config_reader import read_config
from ferrule_server.model.families import FAMILIES, WRAPPERS
from ferrule_server.model.families.others import SMALL
from ferrule_server.model.hub import fetch_model
from ferrule_server.model.weights import TORCH_DTYPES, DTypeName, load_model
from ferrule_server.model_check.__main__ import main, size
from ferrule_server.model_check.report import Details, Report, check_model
from tests.executor.cpu.models import DEMO, write_awkward
from tests.executor.cpu.test_families import case_of
from tests.model.conftest import CASES, make_example
from tests.model.dense_families import DENSE_CASES, dense_families_known
from tests.model.hub_stand_in import Hub, files_of, serving
from tests.model.published_sizes import MODELS, Published
from tests.model.small_model import CONFIG, write_small_model
from tests.tools import KERNEL_CACHE

NAME = "tiny/model"
WEIGHTS = ".safetensors"
DTYPES: tuple[DTypeName, ...] = ("float32", "bfloat16", "float16")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove settings of the environment that would change what is checked."""
    for name in ("CONFIG", "DTYPE", "KV_MEMORY", "WEIGHTS", "MAX_CONTEXT", "DEVICE", "EXECUTOR", "OFFLINE", "REVISION"):
        monkeypatch.delenv(f"FERRULE_{name}", raising=False)


def checked(model: Path | str, **settings: Any) -> Details:
    """Return how a model loads; it does."""
    report = check_model(ServerConfig(model=str(model), **{"device": "cpu", **settings}))
    assert report.details is not None, report
    return report.details


def refused(model: Path | str, **settings: Any) -> Report:
    """Return why a model does not load; it does not."""
    report = check_model(ServerConfig(model=str(model), **{"device": "cpu", **settings}))
    assert not report.loads
    assert report.reason
    return report


def folder_of(folder: Path, **changes: Any) -> Path:
    """Return a folder with a config.json of a small model that is changed."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder


# ---- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_bytes_are_those_of_a_loaded_model(case: str, tmp_path: Path) -> None:
    """Of every family, to the byte, for every type."""
    make_example(CASES[case], tmp_path)
    details = checked(tmp_path, executor="torch", dtype="float32")
    for dtype in DTYPES:
        model = load_model(tmp_path, dtype=dtype)
        assert details.weights_bytes_by_type[dtype] == model.weights_bytes, dtype
        assert details.num_parameters == model.num_parameters
    assert details.weights_bytes == details.weights_bytes_by_type["float32"]
    assert details.max_context == (3 * 512 if case == "llama-linear-rope" else 512)


WIDE = (
    "gemma2-window-softcap", "phi3-longrope-partial", "olmo2", "cohere2-parallel", "starcoder2-layernorm",
    "gemma4-shared-kv-second-embedding", "gemma4-values-are-keys",
)  # fmt: skip
"""Cases whose layers have other parts; their heads are made as wide as kernels need."""


@pytest.mark.parametrize("weights", ["float", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", ["awkward", "demo", *WIDE])
def test_bytes_of_packed_weights_are_those_of_a_loaded_model(
    shape: str, dtype: DTypeName, weights: Any, tmp_path: Path
) -> None:
    """What the kernels of the processor read has another size; nothing is compiled to know it."""
    if shape in WIDE:
        folder = make_example(case_of(shape), tmp_path).folder
    else:
        folder = DEMO if shape == "demo" else write_awkward(tmp_path)
    config = read_config(folder)
    plan = choose(config, dtype, weights).plan
    assert plan is not None
    packer = packing.Packer(config, plan, defaultdict(lambda: lambda *_: 0))
    model = load_model(folder, dtype=dtype, config=config, encoding=packer)
    details = checked(folder, dtype=dtype, weights=weights)
    assert details.weights_bytes == model.weights_bytes
    assert details.executor == "numba-cpu"


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "float32"}, {"dtype": "float16"}, {"weights": "int8"}, {"executor": "torch"}, {"max_context": 100}],
    ids=str,
)
def test_the_path_is_that_of_a_server(settings: dict[str, Any]) -> None:
    """Executor, type, context and bytes of KV are those of what a server with these settings makes."""
    details = checked("demo", **settings)
    config = ServerConfig(
        model="demo", device="cpu", kv_memory_bytes=1 << 20, kernel_cache=Path(KERNEL_CACHE), **settings
    )
    loaded = create_executor(config, lambda _stage, _share: None)
    try:
        info = loaded.executor.info
        assert details.executor == info.name.partition(" ")[0]
        assert (details.dtype, details.weights_bytes) == (info.kv_dtype, info.model.weights_bytes)
        assert details.max_context == info.model.max_context
        assert details.kv_bytes_per_token * info.block_size == info.bytes_per_block
        assert details.kv_bytes == -(-details.max_context // info.block_size) * info.bytes_per_block
    finally:
        loaded.executor.close()


def test_no_kernels_are_no_reason_not_to_load(tmp_path: Path) -> None:
    """Torch runs such a model, and the reasons of both kinds of kernels are there."""
    make_example(CASES["llama-gqa-1to1-untied-biases"], tmp_path)
    details = checked(tmp_path)
    assert details.executor == "torch"
    assert "head_dim 22 is not a multiple of" in details.path_reason
    assert "head_dim 22" in details.processor_kernels
    assert "heads of 64 or 128 values, not 22" in details.gpu_kernels
    assert set(details.weights_bytes_by_type) == set(DTYPES)
    report = refused(tmp_path, weights="int8")
    assert "--weights int8 needs kernels" in report.reason
    assert report.instead == "--weights float in place of int8"


@pytest.mark.parametrize(
    ("case", "processor", "gpu"),
    [
        ("llama4-chunks-everywhere", ("attention in chunks",), ("not to chunks of 10",)),
        (
            "gpt-oss-sinks-clamped-swiglu",
            ("a clamped SwiGLU", "attention sinks"),
            ("attention without sinks", "the default clamped_swiglu"),
        ),
    ],
)
def test_torch_serves_what_only_it_computes(
    case: str, processor: tuple[str, ...], gpu: tuple[str, ...], tmp_path: Path
) -> None:
    """Both kinds of kernels name what they lack, and a server runs torch."""
    make_example({**DENSE_CASES[case], "head_dim": 16}, tmp_path)
    with dense_families_known():
        details = checked(tmp_path)
        config = ServerConfig(model=str(tmp_path), device="cpu", kv_memory_bytes=1 << 20)
        loaded = create_executor(config, lambda _stage, _share: None)
        loaded.executor.close()
    assert loaded.executor.info.name == details.executor == "torch"
    assert details.processor_kernels == f"they do not compute {', '.join(processor)}"
    assert all(words in details.gpu_kernels for words in gpu), details.gpu_kernels
    assert details.processor_kernels in details.path_reason


@pytest.mark.parametrize(
    ("settings", "executor", "reason"),
    [
        ({}, "numba-cuda", ""),
        ({"dtype": "float32"}, "torch", "bfloat16, not float32"),
        ({"executor": "torch"}, "torch", "the settings say so"),
        ({"has_cuda_runner": False}, "torch", "the settings say so"),
    ],
    ids=str,
)
def test_a_gpu_runs_what_its_kernels_know(
    settings: dict[str, Any], executor: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is a stand-in; weights have no packed form there, and cannot be quantised."""
    monkeypatch.setattr(loading, "_device_of", lambda _config: Device(0))
    details = checked("demo", device="auto", **settings)
    assert (details.executor, details.device) == (executor, "cuda:0")
    assert details.dtype == settings.get("dtype", "bfloat16")
    assert reason in details.path_reason
    assert bool(reason) == bool(details.path_reason)
    assert set(details.weights_bytes_by_type) == set(DTYPES)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"executor": "numba-cuda"}], ids=str)
def test_a_gpu_that_is_not_there_is_wrong_usage(settings: dict[str, Any]) -> None:
    """As it is for a server."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"--device cuda|--executor numba-cuda"):
        check_model(ServerConfig(model="demo", **settings))


# ---- refusals -------------------------------------------------------------------------------------------------------


EXPERTS, STATE = "a mixture of experts", "layers with recurrent state"
MODALITIES, NO_TEXT, BOTH = "several modalities", "an output that is not text", "an encoder with a decoder"
LLAMA, QWEN2, QWEN3 = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen2.5-7B-Instruct", "Qwen/Qwen3-8B"
MISTRAL, GEMMA2, GEMMA3 = "mistralai/Mistral-7B-Instruct-v0.3", "google/gemma-2-2b-it", "google/gemma-3-1b-it"
GRANITE, OLMO2 = "ibm-granite/granite-3.3-2b-instruct", "allenai/OLMo-2-1124-7B-Instruct"
PHI, GLM4 = "microsoft/Phi-4-mini-instruct", "zai-org/GLM-4-9B-0414"
OTHERS = {
    ((EXPERTS,), MISTRAL): "MixtralForCausalLM",
    ((EXPERTS,), LLAMA): "DeepseekV2ForCausalLM DeepseekV3ForCausalLM Llama4ForCausalLM",
    ((EXPERTS,), OLMO2): "OlmoeForCausalLM",
    ((EXPERTS,), GRANITE): "GraniteMoeForCausalLM GraniteMoeSharedForCausalLM",
    ((EXPERTS,), PHI): "PhimoeForCausalLM",
    ((EXPERTS,), GLM4): "Glm4MoeForCausalLM",
    ((EXPERTS,), SMALL): "GptOssForCausalLM DbrxForCausalLM",
    ((EXPERTS, MODALITIES), QWEN3): "Qwen3VLMoeForConditionalGeneration",
    ((EXPERTS, MODALITIES), LLAMA): "Llama4ForConditionalGeneration",
    ((STATE, EXPERTS), QWEN3): "Qwen3NextForCausalLM Qwen3_5MoeForCausalLM",
    ((STATE, EXPERTS, MODALITIES), QWEN3): "Qwen3_5MoeForConditionalGeneration",
    ((STATE, MODALITIES), QWEN3): "Qwen3_5ForConditionalGeneration",
    ((STATE, EXPERTS), GRANITE): "GraniteMoeHybridForCausalLM",
    ((STATE, EXPERTS), SMALL): "MiniMaxForCausalLM JambaForCausalLM Lfm2MoeForCausalLM NemotronHForCausalLM",
    ((STATE,), QWEN3): "Qwen3_5ForCausalLM",
    ((STATE,), LLAMA): "FalconH1ForCausalLM FalconMambaForCausalLM",
    ((STATE,), GEMMA2): "RecurrentGemmaForCausalLM",
    ((STATE,), SMALL): (
        "ZambaForCausalLM Zamba2ForCausalLM BambaForCausalLM Lfm2ForCausalLM MambaForCausalLM Mamba2ForCausalLM"
        " RwkvForCausalLM"
    ),
    ((MODALITIES,), QWEN2): "Qwen2VLForConditionalGeneration Qwen2_5_VLForConditionalGeneration",
    ((MODALITIES,), QWEN3): "Qwen3VLForConditionalGeneration",
    ((MODALITIES,), LLAMA): "LlavaForConditionalGeneration MllamaForConditionalGeneration",
    ((MODALITIES,), GEMMA2): "PaliGemmaForConditionalGeneration",
    ((MODALITIES,), GEMMA3): "Gemma3nForConditionalGeneration",
    ((MODALITIES,), PHI): "Phi4MultimodalForCausalLM",
    ((MODALITIES,), GLM4): "Glm4vForConditionalGeneration",
    ((NO_TEXT,), SMALL): "BertModel BertForMaskedLM RobertaForMaskedLM XLMRobertaModel ModernBertForMaskedLM",
    ((BOTH,), SMALL): (
        "T5ForConditionalGeneration BartForConditionalGeneration MarianMTModel WhisperForConditionalGeneration"
    ),
    ((), GEMMA2): "GemmaForCausalLM",
    ((), GEMMA3): "Gemma3nForCausalLM",
    ((), PHI): "PhiForCausalLM",
    ((), OLMO2): "OlmoForCausalLM",
    ((), "CohereLabs/c4ai-command-r7b-12-2024"): "CohereForCausalLM",
    ((), LLAMA): "FalconForCausalLM",
    ((), SMALL): (
        "GPT2LMHeadModel GPTJForCausalLM GPTNeoXForCausalLM OPTForCausalLM BloomForCausalLM MptForCausalLM"
        " StableLmForCausalLM GPTBigCodeForCausalLM NemotronForCausalLM"
    ),
}
"""Architectures that do not load, by what they have that is not supported and by what to try in their place."""


@pytest.mark.parametrize(
    ("architecture", "parts", "instead"),
    [(name, parts, instead) for (parts, instead), names in OTHERS.items() for name in names.split()],
)
def test_what_does_not_load_says_why_and_what_to_try(
    architecture: str, parts: tuple[str, ...], instead: str, tmp_path: Path
) -> None:
    """Given the settings of its class in transformers: all that is not supported, each with the key that says so."""
    settings = getattr(transformers, architecture).config_class().to_dict() | {"architectures": [architecture]}
    (tmp_path / "config.json").write_text(json.dumps(settings, default=str))
    report = refused(tmp_path)
    assert f"architectures is ['{architecture}'], which is not supported" in report.reason
    named = dict(re.findall(r"(?:it has|,) ([a-z -]+) \((\w+)\)", report.reason))
    assert tuple(named) == parts
    assert all(key == architecture or f'"{key}": ' in (tmp_path / "config.json").read_text() for key in named.values())
    assert report.instead == instead
    assert architecture not in {known.architecture for known in (*FAMILIES, *WRAPPERS)}, "it loads"


def test_what_is_to_be_tried_is_of_a_family_that_loads() -> None:
    """Every family names its models, and its example belongs to it by its name."""
    assert all(family.models for family in FAMILIES)
    names = {family.example: family.models for family in FAMILIES if family.example}
    for example, models in names.items():
        word = re.split("[-_]", example.partition("/")[2].replace("c4ai-", ""))[0].lower()
        assert word[:4] in models.lower(), example


@pytest.mark.parametrize(
    "settings",
    [
        {"num_experts": 0}, {"num_local_experts": None}, {"use_moe": False}, {"is_encoder_decoder": False},
        {"conv_bias": False}, {"vision_config": {}}, {"vision_config": {"num_experts": 8, "mamba_d_state": 4}},
        {"num_experts_per_tok": 2}, {"output_hidden_states": True}, {"num_experts_" * 100_000: 8},
    ],
    ids=lambda settings: next(iter(settings))[:30],
)  # fmt: skip
def test_what_is_off_is_not_named(settings: dict[str, Any], tmp_path: Path) -> None:
    """Nor is anything that lies inside another modality."""
    report = refused(folder_of(tmp_path, architectures=["NewForCausalLM"], **settings))
    expected = "it has several modalities" if settings.get("vision_config") else ""
    assert ("it has" in report.reason) == bool(expected)
    assert expected in report.reason
    assert "experts" not in report.reason
    assert "state (" not in report.reason


@pytest.mark.parametrize(
    ("changes", "reason", "instead"),
    [
        ({"architectures": ["NewMoeForCausalLM"], "num_experts": 8}, "a mixture of experts (num_experts)", QWEN3),
        ({"architectures": ["NewForMaskedLM"]}, "an output that is not text (NewForMaskedLM)", QWEN3),
        (
            {"architectures": ["ChatGLMModel"], "model_type": None},
            "the nearest that loads is GlmForCausalLM",
            "zai-org",
        ),
        ({"architectures": ["NewForCausalLM"], "model_type": "new"}, "docs/models.md lists what loads", SMALL),
        ({"architectures": ["NewForCausalLM"], "model_type": "olmo2"}, "nearest that loads is Olmo2ForCausalLM", OLMO2),
        ({"architectures": ["LlamaModel"], "model_type": None}, "nearest that loads is LlamaForCausalLM", LLAMA),
        ({"architectures": ["Qwen2Model"], "num_experts": 8}, "a mixture of experts", QWEN2),
        ({"architectures": None, "model_type": "Granit"}, "nearest that loads is GraniteForCausalLM", GRANITE),
        ({"architectures": None, "model_type": 5}, "architectures is None", SMALL),
        ({"architectures": ["Bert" * 500_000], "model_type": "x" * 500_000}, "which is not supported", SMALL),
        ({"architectures": [{"a": 1}]}, "architectures is [{'a': 1}]", QWEN3),
        ({"architectures": ["A", "B"], "model_type": []}, "architectures is ['A', 'B']", SMALL),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised by 'gptq'", "--weights int8"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised by 'awq'", "--weights int8"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by 'fp8'", "the original repository"),
        ({"quantization": {"bits": 4}}, "the checkpoint is quantised", "--weights int8"),
        ({"a_setting_of_tomorrow": 1}, "a_setting_of_tomorrow is 1", ""),
    ],
    ids=lambda value: str(value)[:80],
)
def test_configurations_are_refused_with_advice(
    changes: dict[str, Any], reason: str, instead: str, tmp_path: Path
) -> None:
    """A model that is known has something to try in its place."""
    report = refused(folder_of(tmp_path, **changes))
    assert reason in report.reason
    assert instead in report.instead
    assert bool(instead) == bool(report.instead)


@pytest.mark.parametrize(
    ("files", "reason", "instead"),
    [
        (["adapter_config.json", "adapter_model.safetensors"], "a LoRA adapter", "merge"),
        (["model-q4_k_m.gguf"], "GGUF", "--model FILE.gguf"),
        (["pytorch_model.bin"], "pickles", "safetensors"),
        ([], "config.json is missing", ""),
    ],
    ids=str,
)
def test_folders_of_other_formats_are_refused_with_advice(
    files: list[str], reason: str, instead: str, tmp_path: Path
) -> None:
    """What they hold is said by name."""
    for name in files:
        (tmp_path / name).write_text("{}")
    report = refused(tmp_path)
    assert reason in report.reason
    assert instead in report.instead


def test_a_path_that_is_not_there_is_said_to_be_none() -> None:
    """Before anything is said about a hub, and nobody is asked."""
    names = "a model of the hub is named org/name, org/name:Q4_K_M or org/name/FILE.gguf"
    for name in ("./models/nope", "/models/nope", "nope"):
        assert refused(name).reason == f"there is no such folder or file; {names}"


def test_tensors_are_compared_before_anything_is_read(tmp_path: Path) -> None:
    """Missing ones are named, as by a server."""
    folder = write_small_model(tmp_path / "small")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "tensor model.norm.weight is missing" in refused(folder).reason


# ---- the commands ---------------------------------------------------------------------------------------------------


def test_exit_codes_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0, 1 and 2; the keys are the same, whether it loads or not."""
    assert main(["--model=demo", "--json"]) == 0
    loads = json.loads(capsys.readouterr().out)
    assert main([f"--model={folder_of(tmp_path, architectures=['MixtralForCausalLM'])}", "--json"]) == 1
    does_not = json.loads(capsys.readouterr().out)
    assert list(loads) == list(does_not)
    assert (loads["loads"], does_not["loads"]) == (True, False)
    kinds = {
        "model": str, "loads": bool, "reason": str, "instead": str, "architecture": str, "num_layers": int,
        "num_parameters": int, "max_context": int, "executor": str, "device": str, "dtype": str, "path_reason": str,
        "processor_kernels": str, "gpu_kernels": str, "weights": str, "packed_types": list, "weights_bytes": int,
        "active_bytes": int, "most_tokens_per_s": type(None), "weights_bytes_by_type": dict,
        "kv_bytes_per_token": int, "kv_bytes": int, "left_out": list,
        "stored_bytes": int, "download_bytes": int, "memory": dict, "warnings": list,
    }  # fmt: skip
    assert loads.keys() - {"commit"} == kinds.keys()
    assert {key: type(loads[key]) for key in kinds} == kinds
    assert {does_not[key] for key in does_not.keys() - {"model", "loads", "reason", "instead"}} == {None}


def test_a_mixture_says_what_a_token_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of the experts those that it passes, of the embedding nothing; and about how many tokens that permits."""
    case = {**CASES["qwen3-moe"], "hidden_size": 64, "head_dim": 32, "moe_intermediate_size": 32}
    folder = make_example(case | {"decoder_sparse_step": 1, "tie_word_embeddings": False}, tmp_path / "moe").folder
    config = read_config(folder)
    unread = config.vocab_size * 64 + 4 * (9 - 2) * 3 * 32 * 64
    assert active_bytes(config, torch.float32) == 4 * (num_parameters(config) - unread)
    assert main([f"--model={folder}", "--dtype=float32", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["active_bytes"] < found["weights_bytes"]
    assert found["most_tokens_per_s"] > 1
    assert main([f"--model={folder}"]) == 0
    assert re.search(r"each token +reads \S+ \w+ of them: at most about \S+ tokens/s of one", capsys.readouterr().out)


def test_what_would_run_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """By the flags of a server, which refuses the same."""
    assert main(["--model=demo", "--executor=torch"]) == 0
    assert re.search(r"runs on +torch on cpu .*the settings say so", capsys.readouterr().out)
    assert main(["--model=demo", "--activations=int8"]) == 2
    assert "--activations int8 goes with --weights int8, or Q8_0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype=int3"], "error: --dtype 'int3': must be one of"),
        (["--max-context=0"], "error: --max-context '0'"),
        (["--max-context=4096"], "error: --max-context 4096 is beyond the 2048 tokens that demo supports"),
        (["--weights=int2"], "error: --weights 'int2': must be one of"),
    ],
    ids=str,
)
def test_wrong_usage_ends_with_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line on stderr."""
    assert main(["--model=demo", *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert captured.err.startswith(message)


def test_variables_of_a_server_count(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags win over them, and a message names the variable."""
    monkeypatch.setenv("FERRULE_DTYPE", "float32")
    monkeypatch.setenv("FERRULE_LISTEN", "what is not read here")
    assert main(["--model=demo", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "float32"
    assert main(["--model=demo", "--dtype=bfloat16", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dtype"] == "bfloat16"
    monkeypatch.setenv("FERRULE_MAX_CONTEXT", "4096")
    assert main(["--model=demo"]) == 2
    assert "FERRULE_MAX_CONTEXT=4096 is beyond" in capsys.readouterr().err


def test_the_memory_of_a_server_is_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As at its start, with the same table; a model loads all the same, perhaps on another machine."""
    monkeypatch.setenv("FERRULE_DEVICE", "cpu")
    monkeypatch.setenv("FERRULE_KV_MEMORY", "512TiB")
    assert main(["--model=demo"]) == 0
    text = capsys.readouterr().out
    details = checked("demo", kv_memory_bytes=1 << 49)
    assert "memory here, too little: a server would end with exit code 2" in text
    assert " 524288.00 GiB  --kv-memory\n" in text
    assert not details.memory.fits
    assert (details.memory.weights, details.memory.kv_pool) == (details.weights_bytes, 1 << 49)
    assert checked("demo", kv_memory_bytes=1 << 20).memory.fits


def test_the_file_of_a_server_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Below flags and variables; a message names the key."""
    path = tmp_path / "ferrule.toml"
    path.write_text("model = 'other'\ndtype = 'float32'\nmax-context = 128\nlisten = 'unix:/s'\n")
    monkeypatch.setenv("FERRULE_CONFIG", str(path))
    assert main(["--model=demo", "--max-context=64", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["dtype"], facts["max_context"]) == ("float32", 64)
    path.write_text("max-context = 4096\n")
    assert main(["--model=demo"]) == 2
    assert f"{path}: max-context = 4096 is beyond" in capsys.readouterr().err


def test_the_command_gives_flags_and_exit_code_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A process of the server's package prints the report."""
    assert app.main(["check", "demo", "--json", "--dtype", "float32", "--max-context", "99", "--weights", "int8"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["dtype"], found["max_context"], found["weights"]) == ("float32", 99, "int8")
    assert app.main(["check", "--model", "demo", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["model"] == "demo"
    for wrong in ([], ["demo", "--model", "demo"]):
        assert app.main(["check", *wrong]) == 2
        assert "--model" in capfd.readouterr().err
    assert app.main(["check", str(folder_of(tmp_path, architectures=["BertModel"]))]) == 1
    assert "does not load" in capfd.readouterr().out


def test_keys_can_be_ignored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The flag can be repeated; what was ignored is a warning, in text and as JSON."""
    folder = write_small_model(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "a_setting_of_tomorrow": 1, "zeta": [2]}))
    report = refused(folder)
    assert "a_setting_of_tomorrow is 1, zeta is [2]" in report.reason
    assert "--ignore-config-key NAME" in report.reason
    flags = ["--ignore-config-key", "zeta", "--ignore-config-key", "a_setting_of_tomorrow,psi"]
    assert app.main(["check", str(folder), *flags]) == 0
    text = capfd.readouterr().out
    assert "warning       config_key_ignored key=zeta value=[2]\n" in text
    assert app.main(["check", str(folder), "--json", *flags]) == 0
    assert [line.split()[:2] for line in json.loads(capfd.readouterr().out)["warnings"]] == [
        ["config_key_ignored", "key=a_setting_of_tomorrow"],
        ["config_key_absent", "key=psi"],
        ["config_key_ignored", "key=zeta"],
    ]


@pytest.mark.parametrize(
    ("files", "found"),
    [
        (["tekken.json", "params.json"], "'tekken.json'"),
        (["vocab.json", "merges.txt", "tokenizer_config.json"], "'merges.txt, tokenizer_config.json, vocab.json'"),
        (["tokenizer.model", "README.md"], "'tokenizer.model'"),
        ([], "'none'"),
    ],
    ids=str,
)
def test_a_model_without_a_tokenizer_is_one_warning(
    files: list[str], found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In the check and at the start of a server; what is there is named."""
    folder = write_small_model(tmp_path / "small")
    (folder / "tokenizer.json").unlink()
    for path in folder.glob("*token*"):
        path.unlink()
    for name in files:
        (folder / name).write_text("{}")
    (warning,) = checked(folder).warnings
    assert warning.startswith(f"no_tokenizer found={found} ")
    config = ServerConfig(model=str(folder), device="cpu", executor="torch", kv_memory_bytes=1 << 20)
    loaded = create_executor(config, lambda _stage, _share: None)
    loaded.executor.close()
    said = [record.getMessage() for record in caplog.records if "no_tokenizer" in record.getMessage()]
    assert said == [f"event={warning}"]


def test_a_server_logs_each_ignored_key_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At its start."""
    folder = write_small_model(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "zeta": 1}))
    settings = ServerConfig(
        model=str(folder), device="cpu", executor="torch", kv_memory_bytes=1 << 20, ignored_config_keys=("zeta",)
    )
    create_executor(settings, lambda _stage, _share: None).executor.close()
    said = [(record.levelname, record.getMessage()) for record in caplog.records if "zeta" in record.getMessage()]
    assert said == [("WARNING", "event=config_key_ignored key=zeta value=1")]


def test_a_context_beyond_dynamic_scaling_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Its frequencies would depend on the length of a sequence."""
    folder = write_small_model(tmp_path / "small")
    config = json.loads((folder / "config.json").read_text())
    config |= {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 64}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"--max-context 65 is beyond the 64 tokens .*; .*change the KV of earlier"):
        check_model(ServerConfig(model=str(folder), device="cpu", max_context=65))
    assert checked(folder).warnings[0].startswith("dynamic_positions longest=64")


def test_text_has_what_json_has(capsys: pytest.CaptureFixture[str]) -> None:
    """For people, with units."""
    assert main(["--model=demo"]) == 0
    text = capsys.readouterr().out
    details = checked("demo")
    assert text.startswith("demo loads\n")
    for part in (details.executor, size(details.weights_bytes), f"{size(details.kv_bytes_per_token)} per token"):
        assert part in text


# ---- the hub --------------------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model in one file."""
    return write_small_model(tmp_path / "repository")


@pytest.fixture
def hub(repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A stand-in with that repository, and an empty cache."""
    with serving(tiny__model=repository) as hub:
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        template = hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield hub
    huggingface_hub.close_session()


def asked_for_weights(hub: Hub) -> bool:
    """Return whether a request was for weights, or any bytes of them were sent."""
    return hub.sent_bytes > 0 or any(WEIGHTS in seen.path and "index" not in seen.path for seen in hub.seen)


def shard(repository: Path, *, without: str = "", extra: str = "") -> None:
    """Replace the single file by two shards and an index, in which names can be missing or too many."""
    tensors = load_file(repository / "model.safetensors")
    (repository / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, repository / file)
    files.pop(without, None)
    weight_map = {**files, **({extra: "model-00001-of-00002.safetensors"} if extra else {})}
    (repository / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_a_model_of_the_hub_is_checked_without_its_weights(hub: Hub, repository: Path) -> None:
    """The configuration alone is fetched; the figures are those of the folder."""
    (repository / "generation_config.json").write_text("{}")
    details = checked(NAME)
    assert set(hub.files_got()) == {"config.json", "generation_config.json"}
    assert not asked_for_weights(hub)
    assert details.download_bytes == details.stored_bytes == (repository / "model.safetensors").stat().st_size
    assert details.commit == hub.commit(NAME)
    of_folder = checked(repository)
    assert details.weights_bytes_by_type == of_folder.weights_bytes_by_type
    assert (details.kv_bytes, details.executor) == (of_folder.kv_bytes, of_folder.executor)


def test_of_shards_the_index_is_read(hub: Hub, repository: Path) -> None:
    """It names the files, whose sizes the list of files has, and the tensors."""
    shard(repository)
    details = checked(NAME)
    assert set(hub.files_got()) == {"config.json", "model.safetensors.index.json"}
    assert not asked_for_weights(hub)
    assert details.stored_bytes == sum(path.stat().st_size for path in repository.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"without": "model.norm.weight"}, "the index of the weights lacks tensors: model.norm.weight"),
        ({"extra": "model.other.weight"}, "the index of the weights has unexpected tensors: model.other.weight"),
    ],
    ids=str,
)
def test_an_index_of_another_network_is_refused(
    hub: Hub, repository: Path, change: dict[str, str], reason: str
) -> None:
    """Before gigabytes are fetched."""
    shard(repository, **change)
    assert refused(NAME).reason == reason
    assert not asked_for_weights(hub)


def test_frequencies_and_a_tied_head_in_an_index_are_no_fault(hub: Hub, repository: Path) -> None:
    """They are none in a folder."""
    for extra in ("model.layers.0.self_attn.rotary_emb.inv_freq", "lm_head.weight"):
        write_small_model(repository)
        shard(repository, extra=extra)
        checked(NAME)


@pytest.mark.parametrize(
    ("files", "reason", "instead"),
    [
        (["model-q4.gguf"], f"name one of its GGUF files: {NAME}/model-q4.gguf", f"--model {NAME}/model-q4.gguf"),
        (["pytorch_model.bin"], "the repository has no safetensors, only pytorch_model.bin", "with safetensors"),
        (["adapter_config.json", "adapter_model.safetensors"], "it holds a LoRA adapter", "merge"),
        (["README.md"], "the repository has no safetensors", ""),
    ],
    ids=str,
)
def test_repositories_of_other_formats_are_refused_with_advice(
    hub: Hub, repository: Path, files: list[str], reason: str, instead: str
) -> None:
    """Nothing at all is fetched."""
    for name in files_of(repository):
        if name != "config.json" or "adapter_config.json" in files:
            (repository / name).unlink()
    for name in files:
        (repository / name).write_text("{}")
    report = refused(NAME)
    assert reason in report.reason
    assert instead in report.instead
    assert hub.files_got() == []


def test_an_unsupported_model_of_the_hub_says_what_to_try(hub: Hub, repository: Path) -> None:
    """Its configuration is enough to know."""
    folder_of(repository, architectures=["DeepseekV3ForCausalLM"])
    assert refused(NAME).instead == LLAMA
    assert hub.files_got() == ["config.json"]


def test_a_model_of_several_modalities_says_what_is_left_out(hub: Hub, repository: Path) -> None:
    """Of shards, what the index names; of a single file, what there may be."""
    text = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}
    text |= {"model_type": "mistral", "use_sliding_window": None, "max_window_layers": None, "attention_bias": None}
    content = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "text_config": text}
    (repository / "config.json").write_text(json.dumps(content))
    tensors = load_file(repository / "model.safetensors")
    inner = {f"language_{name}": tensor for name, tensor in tensors.items() if "q_norm" not in name}
    inner = {name: tensor for name, tensor in inner.items() if "k_norm" not in name}
    inner = {name.replace("language_model.", "language_model.model."): tensor for name, tensor in inner.items()}
    save_file({**inner, "vision_tower.patch_conv.weight": torch.zeros(4)}, repository / "model.safetensors")
    assert checked(repository).left_out == ("vision_tower",)
    assert checked(NAME).left_out == ("vision_tower", "multi_modal_projector")
    shard(repository)
    assert checked(NAME).left_out == ("vision_tower",)
    assert not asked_for_weights(hub)


def test_a_repository_or_a_hub_that_is_not_there(hub: Hub) -> None:
    """The folder is spoken of first."""
    assert refused("no/body").reason.startswith("no such folder, and http")
    hub.faults.is_down = True
    assert refused(NAME).reason.startswith("no such folder, and http")


def test_what_is_in_the_cache_is_listed(hub: Hub, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Checked models are not complete; fetched ones load, and are checked without the hub."""
    assert main(["--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cached"] == []
    checked(NAME)
    assert main(["--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["cached"]
    assert (entry["model"], entry["loads"]) == (NAME, False)
    assert "not complete" in entry["reason"]
    fetch_model(NAME, None, is_offline=False, check=read_config, on_share=lambda _: None)
    assert main(["--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["cached"]
    assert (entry["loads"], entry["reason"]) == (True, "")
    assert entry["disk_bytes"] >= (repository / "model.safetensors").stat().st_size
    hub.seen.clear()
    assert checked(NAME, is_offline=True).download_bytes == 0
    assert hub.seen == []
    assert main([]) == 0
    assert f"  {NAME}  {size(entry['disk_bytes'])}  loads" in capsys.readouterr().out


# ---- families -------------------------------------------------------------------------------------------------------


def test_every_family_is_listed(capsys: pytest.CaptureFixture[str], hub: Hub) -> None:
    """With its models and what runs them; a new one says what they are."""
    assert main(["--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [entry["architecture"] for entry in listed["families"]] == [family.architecture for family in FAMILIES]
    assert listed["wrappers"] == [wrapper.architecture for wrapper in WRAPPERS]
    assert all(entry["models"] for entry in listed["families"])
    assert {entry["architecture"] for entry in listed["families"] if entry["processor_kernels"] == ""} >= {
        "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    }  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_published_sizes_give_the_published_parameters(model: Published) -> None:
    """The number of parameters is a check of the sizes, rounded as it is published."""
    assert num_parameters(model.network) / 1e9 == pytest.approx(model.billions, rel=6e-3)


def test_types_are_those_of_the_loader() -> None:
    """None is forgotten."""
    assert tuple(TORCH_DTYPES) == DTYPES
