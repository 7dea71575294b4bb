"""llama.cpp through llama-cpp-python: its own C interface, flash attention off, weights in bfloat16, 8 or 4 bits."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.peers.worker import Task, random_prompts, work

__all__ = ["LlamaCppPeer"]

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


class LlamaCppPeer:
    """A model of llama.cpp; every measurement has a context of its own."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._lib: Any = import_module("llama_cpp")  # a package of the peer's environment, without types here
        self._lib.llama_backend_init()
        path = converted(task.folder, task.work_folder, task.variant)
        self._model = self._lib.llama_model_load_from_file(str(path).encode(), self._lib.llama_model_default_params())
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")

    def decode(self, batch: int, context: int, num_steps: int) -> float:
        """Prefill ``batch`` sequences of ``context`` tokens, then return greedy tokens/s by the median step."""
        prompts = random_prompts(self._task, batch, context)
        seconds = []
        with self._context(batch, context + num_steps) as state:
            tokens = np.concatenate(
                [self._run(state, prompt[None], 0, seq) for seq, prompt in enumerate(prompts)]
            )  # one prompt at a time
            for position in range(context, context + num_steps):
                begin = time.perf_counter()
                tokens = self._run(state, tokens[:, None], position, 0)
                seconds.append(time.perf_counter() - begin)
        return batch / statistics.median(seconds)

    def prefill(self, num_tokens: int) -> float:
        """Return prefilled tokens per second of one prompt."""
        with self._context(1, num_tokens) as state:
            begin = time.perf_counter()
            self._run(state, random_prompts(self._task, 1, num_tokens), 0, 0)
            return num_tokens / (time.perf_counter() - begin)

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what computes."""
        return {"llama-cpp-python": metadata.version("llama-cpp-python")}

    @contextmanager
    def _context(self, num_seqs: int, length: int) -> Iterator[Any]:
        lib, params = self._lib, self._lib.llama_context_default_params()
        params.n_ctx = num_seqs * (-(-length // 256) * 256)
        params.n_batch, params.n_ubatch, params.n_seq_max = max(length, num_seqs), 512, num_seqs
        params.n_threads = params.n_threads_batch = self._task.num_threads
        params.flash_attn_type = 0  # off
        state = lib.llama_init_from_model(self._model, params)
        if not state:
            raise RuntimeError("llama.cpp cannot make a context")
        try:
            yield state
        finally:
            lib.llama_free(state)

    def _run(self, state: Any, tokens: npt.NDArray[np.int64], position: int, first_seq: int) -> npt.NDArray[np.int64]:
        """Append ``tokens`` [num_seqs, count] to sequences from ``first_seq`` on; return the best next tokens."""
        lib, (num_seqs, count) = self._lib, tokens.shape
        batch = lib.llama_batch_init(tokens.size, 0, 1)
        try:
            batch.n_tokens = tokens.size
            for index, token in enumerate(tokens.reshape(-1).tolist()):
                batch.token[index], batch.pos[index] = token, position + index % count
                batch.n_seq_id[index], batch.seq_id[index][0] = 1, first_seq + index // count
                batch.logits[index] = (index + 1) % count == 0
            if lib.llama_decode(state, batch):
                raise RuntimeError("llama_decode failed")
        finally:
            lib.llama_batch_free(batch)
        size = self._task.config["vocab_size"]
        rows = [lib.llama_get_logits_ith(state, (seq + 1) * count - 1) for seq in range(num_seqs)]
        return np.array([np.ctypeslib.as_array(row, shape=(size,)).argmax() for row in rows])


def converted(folder: Path, work_folder: Path, variant: str) -> Path:
    """Return the model as a GGUF file without a vocabulary; it is written if that has not been done yet."""
    out = work_folder / f"{folder.name}-{variant}.gguf"
    if not out.exists():
        work_folder.mkdir(parents=True, exist_ok=True)
        unfinished = out.with_suffix(".unfinished")
        _write_gguf(folder, unfinished, variant)
        unfinished.rename(out)
    return out


def _write_gguf(folder: Path, out: Path, variant: str) -> None:
    gguf: Any = import_module("gguf")  # a package of the peer's environment, without types here
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = gguf.GGMLQuantizationType[variant.upper()]
    with gguf_writer(out, config) as writer:
        for name, values in read_tensors(folder / "model.safetensors"):
            if values.ndim == 1:
                writer.add_tensor(gguf_name(name), values)
            else:
                writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)


@contextmanager
def gguf_writer(out: Path, config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield a writer to add the tensors of a Qwen3 to, without a vocabulary; the file is written afterwards."""
    gguf: Any = import_module("gguf")  # as above
    writer = gguf.GGUFWriter(str(out), "qwen3moe" if "num_experts" in config else "qwen3")
    if "num_experts" in config:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    yield writer
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    """Return the name that llama.cpp gives to a tensor of a Qwen3 checkpoint."""
    stem = name.removesuffix(".weight")
    if stem in _NAMES:
        return f"{_NAMES[stem]}.weight"
    index, _, inner = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{index}.{_LAYER_NAMES[inner]}.weight"


def read_tensors(path: Path) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Yield the bfloat16 tensors of a safetensors file as float32, by name."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view(np.uint64)[0])
    header = json.loads(data[8 : 8 + size].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            words = np.frombuffer(data[begin:end].tobytes(), np.uint16).astype(np.uint32) << 16
            yield name, words.view(np.float32).reshape(entry["shape"])


if __name__ == "__main__":
    work(LlamaCppPeer)
