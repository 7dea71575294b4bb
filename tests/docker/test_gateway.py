"""The profile ``openai`` in real containers: the gateway in front of a server, by the official client."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.docker.engine import Project

pytestmark = [pytest.mark.docker, pytest.mark.timeout(900)]


def test_a_turn_prefills_its_new_tokens(tmp_path: Path) -> None:
    """Healthy, published on this machine alone, and each turn after the first has the earlier ones cached."""
    with Project(tmp_path, "openai", profiles=("openai",)) as project:
        base_url = f"http://127.0.0.1:{project.openai_port}/v1"
        with openai.OpenAI(base_url=base_url, api_key="any", max_retries=0) as client:
            (model,) = client.models.list().data
            messages: list[dict[str, str]] = []
            for turn in range(3):
                messages.append({"role": "user", "content": f"def area{turn}("})
                answer = client.chat.completions.create(model=model.id, messages=messages, max_tokens=8)  # type: ignore[arg-type]
                messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
                usage = answer.usage
                assert usage is not None
                assert usage.prompt_tokens_details is not None
                cached = usage.prompt_tokens_details.cached_tokens or 0
                assert (turn == 0) == (cached == 0)
                assert turn == 0 or usage.prompt_tokens - cached < usage.prompt_tokens / 2
        ports = project.inspect("openai")["NetworkSettings"]["Ports"]["8000/tcp"]
        assert {port["HostIp"] for port in ports} == {"127.0.0.1"}
        assert project.stop("openai") == 143  # uvicorn ends in order, then by the signal itself
