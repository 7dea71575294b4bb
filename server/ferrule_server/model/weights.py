"""Safetensors of a Hugging Face folder become the tensors the decoder uses, all of them or a clear error.

Every tensor is checked by name, shape and dtype before memory is allocated, then read straight into its final place:
q, k and v are rows of one matrix, so are gate and up. The bytes are hashed while they are read.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path
from typing import Literal

import torch

from ferrule_server.errors import ModelError
from ferrule_server.model.checkpoint import DTYPE_BYTES, StoredTensor, list_tensors
from ferrule_server.model.config import ModelConfig, read_config
from ferrule_server.model.memory import new_tensor
from ferrule_server.model_files import name_of, open_file

__all__ = ["LayerWeights", "LoadedModel", "ModelWeights", "load_model"]

DTypeName = Literal["float32", "bfloat16"]
Progress = Callable[[int, int], None]

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_BYTES = 8 << 20
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"
_MAX_PROBLEMS = 100


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer, all of one dtype; ``q`` is num_heads * head_dim, ``kv`` is num_kv_heads * head_dim.

    Attributes:
        input_norm: [hidden_size].
        qkv: [q + kv + kv, hidden_size]; rows of q, then k, then v.
        qkv_bias: [q + kv + kv], or None.
        q_norm: [head_dim], or None.
        k_norm: [head_dim], or None.
        attention_out: [hidden_size, q].
        attention_out_bias: [hidden_size], or None.
        post_attention_norm: [hidden_size].
        gate_up: [2 * intermediate_size, hidden_size]; rows of gate, then up.
        gate_up_bias: [2 * intermediate_size], or None.
        down: [hidden_size, intermediate_size].
        down_bias: [hidden_size], or None.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    attention_out: torch.Tensor
    post_attention_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    attention_out_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass(slots=True)
class ModelWeights:
    """Every tensor of a model.

    Attributes:
        embedding: [vocab_size, hidden_size].
        head: [vocab_size, hidden_size]; the very tensor ``embedding`` when tied.
        final_norm: [hidden_size].
        layers: In order.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    layers: list[LayerWeights] = field(default_factory=list)


class LoadedModel:
    """A model in memory, until its weights are taken by the one executor that runs it.

    Args:
        config: What decides the network.
        model_id: Name of the folder.
        dtype: ``float32`` or ``bfloat16``, of weights, activations and KV.
        fingerprint: 32 bytes over weights, dtypes and everything else that decides the KV.
        num_parameters: Distinct parameters, tied ones once.
        weights: Owned by this object until :meth:`take_weights`.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        model_id: str,
        dtype: DTypeName,
        fingerprint: bytes,
        num_parameters: int,
        weights: ModelWeights,
    ) -> None:
        self.config = config
        self.model_id = model_id
        self.dtype = dtype
        self.fingerprint = fingerprint
        self.num_parameters = num_parameters
        self._weights: ModelWeights | None = weights

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch name of ``dtype``."""
        return _TORCH_DTYPES[self.dtype]

    @property
    def weights_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self.num_parameters * self.torch_dtype.itemsize

    def take_weights(self) -> ModelWeights:
        """Hand the weights over; the executor may repack and free them one by one, so it happens once.

        Raises:
            ModelError: They were taken before.
        """
        if self._weights is None:
            raise ModelError(f"the weights of {self.model_id} were taken already; load the model again")
        weights, self._weights = self._weights, None
        return weights


def load_model(folder: Path, *, dtype: DTypeName, on_progress: Progress | None = None) -> LoadedModel:
    """Return the model of a Hugging Face folder, its weights converted to ``dtype``.

    Args:
        folder: Holds config.json and *.safetensors, one file or shards with an index.
        dtype: Of weights, activations and KV.
        on_progress: Called with (bytes read, bytes in all), now and then and at the end.

    Raises:
        ModelError: The model is not supported, or its files do not hold exactly the tensors it needs; every missing,
            unexpected, mis-shaped or broken part is named. No weights are allocated then.
    """
    config = read_config(folder)
    stored = _check_tensors(folder, config)
    try:
        weights, places = _allocate(config, _TORCH_DTYPES[dtype], new_tensor)
    except (MemoryError, OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ModelError(f"no memory for the weights of {folder}: {error}") from error
    digests = _read_all(stored, places, on_progress or _no_progress)
    _check_tied_head(config, digests)
    return LoadedModel(
        config,
        model_id=folder.resolve().name.encode(errors="replace").decode(),  # on a disk a name need not be UTF-8
        dtype=dtype,
        fingerprint=_fingerprint(config, digests, dtype),
        num_parameters=sum(place.numel() for place in places.values()),
        weights=weights,
    )


def _no_progress(done_bytes: int, total_bytes: int) -> None:
    """Progress nobody asked for."""


def _allocate(
    config: ModelConfig, dtype: torch.dtype, new: Callable[[Sequence[int], torch.dtype], torch.Tensor]
) -> tuple[ModelWeights, dict[str, torch.Tensor]]:
    """Return empty weights and, for every tensor name of the checkpoint, the part of them it fills."""
    vocab_shape = (config.vocab_size, config.hidden_size)
    embedding = new(vocab_shape, dtype)
    head = embedding if config.is_tied else new(vocab_shape, dtype)
    weights = ModelWeights(embedding, head, new((config.hidden_size,), dtype))
    places = {_EMBEDDING: embedding, "model.norm.weight": weights.final_norm}
    if not config.is_tied:
        places[_HEAD] = head
    for index in range(config.num_layers):
        layer = _allocate_layer(config, lambda *shape: new(shape, dtype))
        weights.layers.append(layer)
        places.update((f"model.layers.{index}.{name}", place) for name, place in _layer_places(config, layer).items())
    return weights, places


def _allocate_layer(config: ModelConfig, new: Callable[..., torch.Tensor]) -> LayerWeights:
    hidden, intermediate = config.hidden_size, config.intermediate_size
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer = LayerWeights(
        input_norm=new(hidden),
        qkv=new(num_q + 2 * num_kv, hidden),
        attention_out=new(hidden, num_q),
        post_attention_norm=new(hidden),
        gate_up=new(2 * intermediate, hidden),
        down=new(hidden, intermediate),
    )
    if config.has_qk_norm:
        layer.q_norm, layer.k_norm = new(config.head_dim), new(config.head_dim)
    if config.has_attention_bias:
        layer.qkv_bias, layer.attention_out_bias = new(num_q + 2 * num_kv), new(hidden)
    if config.has_mlp_bias:
        layer.gate_up_bias, layer.down_bias = new(2 * intermediate), new(hidden)
    return layer


def _layer_places(config: ModelConfig, layer: LayerWeights) -> dict[str, torch.Tensor]:
    """Return the parts of one layer by the checkpoint's names."""
    num_q, num_kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    places: dict[str, torch.Tensor | None] = {
        "input_layernorm.weight": layer.input_norm,
        "post_attention_layernorm.weight": layer.post_attention_norm,
        "self_attn.q_norm.weight": layer.q_norm,
        "self_attn.k_norm.weight": layer.k_norm,
        "self_attn.o_proj.weight": layer.attention_out,
        "self_attn.o_proj.bias": layer.attention_out_bias,
        "mlp.down_proj.weight": layer.down,
        "mlp.down_proj.bias": layer.down_bias,
    }
    for suffix, qkv, gate_up in (("weight", layer.qkv, layer.gate_up), ("bias", layer.qkv_bias, layer.gate_up_bias)):
        if qkv is not None:
            parts = torch.split(qkv, [num_q, num_kv, num_kv])
            places.update((f"self_attn.{name}_proj.{suffix}", part) for name, part in zip("qkv", parts, strict=True))
        if gate_up is not None:
            halves = torch.split(gate_up, config.intermediate_size)
            places.update(
                (f"mlp.{name}_proj.{suffix}", part) for name, part in zip(("gate", "up"), halves, strict=True)
            )
    return {name: place for name, place in places.items() if place is not None}


def _check_tensors(folder: Path, config: ModelConfig) -> list[StoredTensor]:
    """Return the tensors to read, in file order, once the folder holds exactly what the model needs."""
    stored, accounted, problems = list_tensors(folder)
    _, places = _allocate(config, torch.float32, lambda shape, dtype: torch.empty(*shape, dtype=dtype, device="meta"))
    shapes = {name: tuple(place.shape) for name, place in places.items()}
    if config.is_tied and _HEAD in stored:
        shapes[_HEAD] = shapes[_EMBEDDING]
    for name in shapes.keys() - stored.keys() - accounted:
        problems.append(f"tensor {name} is missing, shape {list(shapes[name])}")
    wanted = [entry for name, entry in stored.items() if not _is_ignorable(name)]
    problems += [problem for entry in wanted if (problem := _problem_of(entry, shapes))]
    if problems:
        raise ModelError(_complaint(folder, sorted(problems)))
    return sorted(wanted, key=lambda entry: (entry.path, entry.offset))


def _complaint(folder: Path, problems: list[str]) -> str:
    """Return one message for everything that is wrong with a folder, at most as much as somebody would read."""
    rest = len(problems) - _MAX_PROBLEMS
    more = [f"and {rest} more"] if rest > 0 else []
    return "\n  - ".join([f"model folder {folder} cannot be loaded:", *problems[:_MAX_PROBLEMS], *more])


def _is_ignorable(name: str) -> bool:
    """Old checkpoints store the rotary frequencies, which config.json decides."""
    return name.endswith("rotary_emb.inv_freq")


def _problem_of(entry: StoredTensor, shapes: dict[str, tuple[int, ...]]) -> str | None:
    name = name_of(entry.name)
    if entry.name not in shapes:
        return f"tensor {name} in {name_of(entry.path.name)} is unexpected"
    if entry.shape != shapes[entry.name]:
        return f"tensor {name} has shape {list(entry.shape)}, {list(shapes[entry.name])} is needed"
    if entry.dtype not in DTYPE_BYTES:
        return f"tensor {name} has dtype {name_of(entry.dtype)}, supported: {', '.join(DTYPE_BYTES)}"
    return None


def _read_all(stored: list[StoredTensor], places: dict[str, torch.Tensor], on_progress: Progress) -> dict[str, bytes]:
    """Fill every place and return the SHA-256 of every tensor's stored bytes with its dtype and shape."""
    total_bytes = sum(entry.num_bytes for entry in stored)
    done_bytes = 0
    digests: dict[str, bytes] = {}
    staging = torch.empty(_CHUNK_BYTES, dtype=torch.uint8)
    for entry in stored:
        digest = hashlib.sha256(f"{entry.dtype} {list(entry.shape)} ".encode())
        reader = _ChunkReader(entry, places.get(entry.name), staging)
        for chunk in reader.chunks():
            digest.update(chunk)
            done_bytes += len(chunk)
            on_progress(done_bytes, total_bytes)
        digests[entry.name] = digest.digest()
    return digests


class _ChunkReader:
    """Reads one tensor in chunks, straight into its place when the dtypes agree, through ``staging`` otherwise.

    Args:
        entry: What to read.
        place: Where it goes, contiguous; None to read it for its digest only.
        staging: uint8 [_CHUNK_BYTES], scratch shared between tensors.
    """

    def __init__(self, entry: StoredTensor, place: torch.Tensor | None, staging: torch.Tensor) -> None:
        self._entry = entry
        self._place = None if place is None else place.reshape(-1)
        self._staging = staging
        self._stored_dtype = _STORED_DTYPES[entry.dtype]

    def chunks(self) -> Iterator[memoryview]:
        """Yield the stored bytes as buffers, each valid until the next is asked for."""
        with open_file(self._entry.path) as file:
            file.seek(self._entry.offset)
            for begin in range(0, self._entry.num_bytes, _CHUNK_BYTES):
                end = min(begin + _CHUNK_BYTES, self._entry.num_bytes)
                raw = self._destination(begin, end)
                buffer = memoryview(raw.numpy().data)
                _read_exactly(file, buffer, self._entry)
                self._convert(raw, begin, end)
                yield buffer

    def _destination(self, begin: int, end: int) -> torch.Tensor:
        if self._place is not None and self._place.dtype == self._stored_dtype:
            return self._place.view(torch.uint8)[begin:end]
        return self._staging[: end - begin]

    def _convert(self, raw: torch.Tensor, begin: int, end: int) -> None:
        if self._place is not None and self._place.dtype != self._stored_dtype:
            size = self._stored_dtype.itemsize
            self._place[begin // size : end // size].copy_(raw.view(self._stored_dtype))


def _read_exactly(file: FileIO, buffer: memoryview, entry: StoredTensor) -> None:
    filled = 0
    while filled < len(buffer):
        try:
            num_read = file.readinto(buffer[filled:])
        except OSError as error:
            raise ModelError(f"{name_of(entry.path)} cannot be read: {error.strerror}") from error
        if not num_read:
            raise ModelError(f"{entry.path.name} ended inside tensor {entry.name}; did it change while it was read?")
        filled += num_read


def _check_tied_head(config: ModelConfig, digests: dict[str, bytes]) -> None:
    """Refuse a stored head that differs from the embedding it is said to be tied to."""
    if config.is_tied and digests.get(_HEAD, digests[_EMBEDDING]) != digests[_EMBEDDING]:
        raise ModelError(f"config.json ties the output head, yet {_HEAD} differs from {_EMBEDDING}")


def _fingerprint(config: ModelConfig, digests: dict[str, bytes], dtype: DTypeName) -> bytes:
    """Return 32 bytes that decide the KV: equal for equal networks, however their files are sharded."""
    network = asdict(replace(config, eos_ids=(), max_positions=1))
    digest = hashlib.sha256(b"ferrule-model-1\0")
    digest.update(json.dumps({"network": network, "dtype": dtype, "kv_dtype": dtype}, sort_keys=True).encode())
    for name in sorted(digests.keys() - ({_HEAD} if config.is_tied else set())):
        digest.update(name.encode() + b"\0" + digests[name])
    return digest.digest()
