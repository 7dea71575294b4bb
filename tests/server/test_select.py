"""Choosing the executor: without torch where none is needed, and bfloat16 only where the processor has it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule_server.config import ServerConfig
from ferrule_server.errors import ConfigError, ModelError
from ferrule_server.executor import select
from ferrule_server.executor.select import create_executor, has_bfloat16_instructions

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


def _ignore(stage: str, share: float) -> None:
    """Progress nobody looks at."""


def test_paged_reference_has_the_settings_asked_for() -> None:
    """Context and pool come from the settings; there is no tokenizer."""
    config = ServerConfig(model=None, executor="paged-reference", max_context=99, kv_memory_bytes=1 << 20)
    loaded = create_executor(config, _ignore)
    info = loaded.executor.info
    assert loaded.tokenizer is None
    assert info.model.max_context == 99
    assert info.num_blocks * info.bytes_per_block == 1 << 20
    loaded.executor.close()


def test_paged_reference_starts_without_torch() -> None:
    """Importing torch takes longer than everything else together."""
    code = (
        "import sys; from ferrule_server.executor.select import create_executor;"
        "from ferrule_server.config import ServerConfig;"
        "create_executor(ServerConfig(model=None, executor='paged-reference'), print);"
        "import ferrule_server.api.serve;"
        "assert not {'torch', 'numba', 'tokenizers'} & set(sys.modules), 'too much was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        ("model name : x\nflags : fpu avx2 avx512_bf16\n", True),
        ("flags : fpu amx_bf16 amx_tile\n", True),
        ("Features : fp asimd bf16 i8mm\n", True),
        ("flags : fpu avx2 avx512f\n", False),
        ("model name : avx512_bf16 in name only\n", False),
        ("", False),
    ],
)
def test_bfloat16_is_chosen_by_processor_flags(cpuinfo: str, has: bool) -> None:
    """Without the instructions bfloat16 is emulated and slower than float32."""
    assert has_bfloat16_instructions(cpuinfo) is has


def test_a_model_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    """Before torch is imported."""
    stages: list[str] = []
    with pytest.raises(ModelError, match="no such folder"):
        create_executor(ServerConfig(model=str(tmp_path / "nothing")), lambda stage, _: stages.append(stage))
    assert stages == []


def test_a_context_beyond_the_models_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """The folder has none, and torch is not imported either."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    stages: list[str] = []
    config = ServerConfig(model=str(tmp_path), max_context=129)
    with pytest.raises(ConfigError, match="--max-context 129 is beyond the 128 tokens"):
        create_executor(config, lambda stage, _: stages.append(stage))
    assert stages == []


def test_a_pool_beyond_the_memory_names_its_flag() -> None:
    """A refused allocation is a setting to change, no fault."""
    config = ServerConfig(model=None, executor="paged-reference", kv_memory_bytes=1 << 49)
    with pytest.raises(ConfigError, match=r"--kv-memory: this machine has no 524288\.0 GiB"):
        create_executor(config, _ignore)


def test_the_model_that_ships_is_no_folder_to_look_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its files the message says what to do, and no path that the user never typed."""
    monkeypatch.setattr(select, "_DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="--model demo: this installation lacks") as caught:
        create_executor(ServerConfig(), _ignore)
    assert str(tmp_path) not in str(caught.value)
