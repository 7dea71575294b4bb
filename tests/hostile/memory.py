"""What one principal can make the server hold and others wait for: long texts that queue, and token masks."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import grpc

from ferrule.v1 import cache_pb2, executor_pb2, tokenizer_pb2, tokenizer_pb2_grpc
from ferrule_server.api.limits import ApiLimits
from tests.chaos.server_process import ServerProcess
from tests.hostile import bodies
from tests.hostile.fairness import Player, scene_of
from tests.hostile.flooder import Spec
from tests.hostile.servers import ATTACKER, MIB, VICTIMS, MemoryWatch, bearer, serving, token_file
from tests.hostile.verdicts import Attack, Campaign, Outcome

QUEUE_GROWTH_MIB = 300.0
QUEUE_SPARE_S = 1.0
MASK_SPARE_MIB = 32.0
_NUM_TEXTS = 60
_VICTIM_BYTES = 88_000
_PATIENCE_S = 25.0
_QUEUE_QUOTAS = "kv_tokens=4096 prefill_rate=2000"

_MASKS_PER_REQUEST = ApiLimits().max_masks_per_request


def run_text_queue(campaign: Campaign) -> Outcome:
    """Let 60 longest texts of the attacker queue, then time a short text of a victim."""
    tokens = token_file(campaign.folder, _QUEUE_QUOTAS)
    with serving(campaign, "text_queue", f"--token-file={tokens}") as server:
        alone_s, _ = _encode(server)
        spec = Spec(server.target, ATTACKER, 4, _NUM_TEXTS // 4, _PATIENCE_S, max_calls=_NUM_TEXTS)
        path = campaign.folder / "texts.json"
        spec.save(path, bodies.encode_longest(scene_of(server)))
        attacker = Player("flooder", str(path))
        try:
            attacker.wait_until_up()
            with MemoryWatch(server.watched) as watch:
                attacker.go()
                time.sleep(1.0)
                took_s, status = _encode(server)
        finally:
            attacker.end()
    figures = {"alone_s": alone_s, "victim_s": took_s, "victim": status, "rss_growth_mib": watch.grown_mib}
    is_met = status == "OK" and took_s <= alone_s + QUEUE_SPARE_S and watch.grown_mib < QUEUE_GROWTH_MIB
    summary = f"Tokenize of 88 KB: {alone_s} -> {took_s} s, {status}; RSS + {watch.grown_mib} MiB"
    return Outcome(summary, figures, "<= its time alone + 1 s; RSS + < 300 MiB", is_met)


def _encode(server: ServerProcess) -> tuple[float, str]:
    """Time a Tokenize of the victim and return its status."""
    stub = tokenizer_pb2_grpc.TokenizerServiceStub(server.channel)
    request = tokenizer_pb2.TokenizeRequest(text=("def main(): return 1\n" * _VICTIM_BYTES)[:_VICTIM_BYTES])
    began_s, status = time.monotonic(), "OK"
    try:
        stub.Tokenize(request, metadata=bearer(VICTIMS[0]), timeout=_PATIENCE_S)
    except grpc.RpcError as error:
        status = error.code().name
    return round(time.monotonic() - began_s, 3), status


def run_mask_memory(campaign: Campaign) -> Outcome:
    """Register new masks up to the quota, with large ones and with small ones."""
    large = _masks(campaign, 64, ("--executor=torch", "--dtype=float32", "--kv-memory=64MiB"))
    small = _masks(campaign, 4, ("--executor=paged-reference", "--kv-memory=64MiB"))
    summary = "; ".join(
        f"RSS + {each['rss_growth_mib']} MiB for a quota of {each['quota_mib']} ({each['mask_bytes']} bytes a mask)"
        for each in (large, small)
    )
    is_met = all(each["rss_growth_mib"] <= each["quota_mib"] + MASK_SPARE_MIB for each in (large, small))
    return Outcome(summary, [large, small], "RSS + <= the quota + 32 MiB", is_met)


def _masks(campaign: Campaign, quota_mib: int, base: Sequence[str]) -> dict[str, float]:
    """Register as many masks as the quota would hold if it counted only their bits."""
    tokens = token_file(campaign.folder, f"mask_bytes={quota_mib}MiB")
    with serving(campaign, "mask_memory", f"--token-file={tokens}", base=base) as server:
        info = server.stub.GetModelInfo(executor_pb2.GetModelInfoRequest(), metadata=bearer(ATTACKER), timeout=20)
        length = (info.info.vocab_size + 7) // 8
        _register(server, _MASKS_PER_REQUEST, length)
        num_masks = quota_mib * MIB // length
        with MemoryWatch(server.watched) as watch:
            for _ in range(num_masks // _MASKS_PER_REQUEST):
                _register(server, _MASKS_PER_REQUEST, length)
    return {
        "quota_mib": quota_mib,
        "mask_bytes": length,
        "num_masks": num_masks,
        "rss_growth_mib": watch.grown_mib,
    }


def _register(server: ServerProcess, count: int, length: int) -> None:
    masks = [b"\1" + os.urandom(length - 1) for _ in range(count)]
    request = cache_pb2.RegisterTokenMaskRequest(masks=masks)
    server.stub.RegisterTokenMask(request, metadata=bearer(ATTACKER), timeout=20)


ATTACKS = [
    Attack("text_queue", "long texts of one principal delay those of others little, and are bounded", run_text_queue),
    Attack("mask_memory", "registered masks take what their quota counts", run_mask_memory),
]
