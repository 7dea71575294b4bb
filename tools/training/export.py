"""Write trained weights to a folder that the server or ``transformers`` can load.

The folder contains config.json, generation_config.json, model.safetensors (bfloat16), tokenizer.json,
tokenizer_config.json and MODEL_CARD.md. The chat template makes it possible to render conversations. The model has seen
none, and continues them like source code.
"""

import json
import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer

from tools.training.model import ModelShape, TrainingModel
from tools.training.tokenizer import END_OF_TEXT, end_of_text_id
from tools.training.train import Progress, TrainingConfig

__all__ = ["CARD_PROMPTS", "CHAT_TEMPLATE", "TrainingRecord", "export_model", "round_weights", "sample"]

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'system' -%}{{ message.content | trim + '\n\n' }}"
    "{%- else -%}{{ message.role | capitalize + ': ' + message.content | trim + '\n' }}{%- endif -%}"
    "{%- endfor -%}"
    "{{ 'Assistant:' if add_generation_prompt else '' }}"
)
CARD_PROMPTS = ("def read_file(path):", "class Queue:", "import os\nimport sys\n\n\ndef main(argv=None):")


@dataclass(frozen=True, slots=True)
class TrainingRecord:
    """The facts about a run that the model card reports.

    Attributes:
        config: The settings of the run.
        progress: The progress at its end.
        num_train_files: Files in the training half.
        num_held_out_files: Files in the held-out half.
        num_train_tokens: Tokens in the training half.
        held_out_losses: (window length in tokens, nats per token) on held-out files.
        held_out_bytes_per_token: Bytes of held-out text per token.
    """

    config: TrainingConfig
    progress: Progress
    num_train_files: int
    num_held_out_files: int
    num_train_tokens: int
    held_out_losses: tuple[tuple[int, float], ...]
    held_out_bytes_per_token: float


def export_model(folder: Path, model: TrainingModel, tokenizer: Tokenizer, record: TrainingRecord) -> None:
    """Write the model folder. Files of an earlier export are replaced.

    Args:
        folder: The folder; created if it is missing.
        model: The weights; not changed.
        tokenizer: The tokenizer with which they were trained.
        record: The facts for the model card.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape, end = model.shape, end_of_text_id(tokenizer)
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": end}
    _write_json(folder / "config.json", _config(shape, ids))
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(shape))
    size = (folder / "model.safetensors").stat().st_size
    card = _card(model, tokenizer, record, size)
    (folder / "MODEL_CARD.md").write_text(card, encoding="utf-8")


def round_weights(model: TrainingModel) -> None:
    """Round every weight to its bfloat16 value in the file, so that the card describes the weights in the file.

    Args:
        model: Changed in place; its dtype stays float32.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def sample(
    model: TrainingModel, tokenizer: Tokenizer, prompt: str, *, num_tokens: int, temperature: float = 0.0, seed: int = 0
) -> str:
    """Continue a prompt. Every token recomputes the whole window.

    Args:
        model: The weights; not changed.
        tokenizer: The tokenizer with which they were trained.
        prompt: Text of at least one token.
        num_tokens: Most tokens to add; fewer if the model ends the text.
        temperature: 0 selects the most likely token.
        seed: Determines the draws if the temperature is above 0.

    Returns:
        The prompt and its continuation.
    """
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = tokenizer.encode(prompt, add_special_tokens=False).ids
    end = end_of_text_id(tokenizer)
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([token_ids]))[0, -1].float()
        token_id = _choose(logits, temperature, generator)
        if token_id == end:
            break
        token_ids.append(token_id)
    return str(tokenizer.decode(token_ids))


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    if temperature == 0.0:
        return int(logits.argmax())
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _config(shape: ModelShape, ids: dict[str, int]) -> dict[str, Any]:
    """Return config.json, with both the old and the new names of dtype and RoPE."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rope_parameters": {"rope_theta": shape.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        **ids,
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }


def _tokenizer_config(shape: ModelShape) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "model_max_length": shape.max_positions,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _card(model: TrainingModel, tokenizer: Tokenizer, record: TrainingRecord, size_bytes: int) -> str:
    facts = _card_head(model, size_bytes), _card_training(record)
    return "\n".join((*facts, _card_samples(model, tokenizer), _card_limits(record, model.shape)))


def _card_head(model: TrainingModel, size_bytes: int) -> str:
    shape = model.shape
    return f"""# The bundled model of Ferrule

A very small decoder-only language model that continues Python source. With it the server runs at once, on any
CPU, without a download. It is not meant to write programs.

| | |
| --- | --- |
| Architecture | Qwen3 (`Qwen3ForCausalLM`): RMSNorm, grouped-query attention with q/k norm, SwiGLU, tied embeddings |
| Shape | {shape.num_layers} layers, hidden {shape.hidden_size}, feed-forward {shape.intermediate_size}, \
{shape.num_heads} query and {shape.num_kv_heads} key/value heads of {shape.head_dim} |
| Parameters | {model.num_parameters() / 1e6:.2f} M, bfloat16, {size_bytes / 1e6:.2f} MB |
| Tokenizer | byte-level BPE, {shape.vocab_size} entries; a newline and the indentation after it are one token |
| End of text | `{END_OF_TEXT}` between files |
| Chat template | plain, `User: ...` and `Assistant: ...` on separate lines; the model has seen no conversation |
| Licence of the weights | Apache-2.0, like the project |

## Corpus

The standard library of the Python {platform.python_version()} interpreter that ran the training, without tests,
encodings and generated data. That source is copyright the Python Software Foundation and its contributors,
licensed under the PSF License Agreement version 2; see `LICENSE.txt` in the library folder of
any Python. No other text and no other model was used. The model can repeat parts of that source word for word.
"""


def _card_training(record: TrainingRecord) -> str:
    rows = "\n".join(
        f"| Held-out loss, windows of {length} | {loss:.3f} nats per token, "
        f"{loss / math.log(2) / record.held_out_bytes_per_token:.3f} bits per byte |"
        for length, loss in record.held_out_losses
    )
    progress, minutes = record.progress, record.progress.elapsed_s / 60.0
    command = f"python -m tools.training --out DIR --minutes {minutes:.0f}"
    command += " --compile" if record.config.use_compile else ""
    return f"""## Training

| | |
| --- | --- |
| Split | by file: {record.num_train_files} for training, {record.num_held_out_files} held out |
| Tokens | {record.num_train_tokens / 1e6:.2f} M in the corpus, {progress.num_tokens / 1e6:.2f} M seen \
({progress.num_tokens / record.num_train_tokens:.1f} passes) |
| Optimizer | Muon for the matrices, AdamW for the embedding and norms, bfloat16 autocast, {progress.step} steps |
| Time | {minutes:.0f} minutes on one thread of a shared machine with {os.cpu_count()} CPU cores |
| Training loss | {progress.train_loss:.3f} nats per token |
{rows}

Repeat it with `{command}`; the number of steps in a
budget of minutes depends on the machine, so the numbers will differ a little.
"""


def _card_samples(model: TrainingModel, tokenizer: Tokenizer) -> str:
    blocks = []
    for prompt in CARD_PROMPTS:
        for label, temperature in (("greedy", 0.0), ("temperature 0.7, seed 1", 0.7)):
            text = sample(model, tokenizer, prompt, num_tokens=96, temperature=temperature, seed=1)
            blocks.append(f"{label}:\n\n````python\n{text.rstrip()}\n````\n")
    return "## Samples\n\nUnedited, up to 96 tokens, first draw.\n\n" + "\n".join(blocks)


def _card_limits(record: TrainingRecord, shape: ModelShape) -> str:
    longest = max(record.config.window_lengths)
    return f"""## Limits

* Its output looks like Python but has no meaning. Greedy decoding soon repeats itself, so sample at about 0.7.
* Training windows have up to {longest} tokens. The configuration allows {shape.max_positions}.
  Beyond the trained length it still runs, with a loss that rises every few hundred tokens.
* The training loss is well below the held-out loss: the model has partly memorized the files of the training.
* End prompts at the last visible character (`def f(x):`, not `def f(x):` and a newline): the newline and its
  indentation are one token, so a bare newline says that the next line is not indented.
* It knows only the English and Python of the standard library. Names of its authors may appear in its output.
"""
