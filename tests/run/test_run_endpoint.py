"""A run answers HTTP requests with the engines that it trains with."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tailrace.run.train import train
from tests.conftest import TinyModel
from tests.helpers.runs import assert_same_run, small_run
from tests.helpers.separated_runs import SYNCHRONOUS, at_events


@pytest.mark.parametrize("pipeline", [{}, SYNCHRONOUS])
def test_requests_beside_a_run_are_answered_and_change_nothing(
    tmp_path: Path,
    tiny_model: TinyModel,
    prompts: Path,
    local: object,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: dict[str, Any],
) -> None:
    alone, beside = tmp_path / "alone", tmp_path / "beside"
    answers: list[httpx.Response] = []
    asked: list[asyncio.Task[None]] = []

    async def ask() -> None:
        known = json.loads((beside / "http.json").read_text())
        async with httpx.AsyncClient(base_url=known["url"], timeout=60) as client:
            headers = {"authorization": f"Bearer {known['token']}"}
            for version, prompt in ((1, "n1"), (99, "n2")):
                body = {"model": "policy", "prompt": prompt, "max_tokens": 5, "weight_version": version}
                answers.append(await client.post("/completions", json=body, headers=headers))

    def react(_: dict[str, int]) -> None:
        asked.append(asyncio.get_running_loop().create_task(ask()))

    for run in (alone, beside):
        changes: dict[str, Any] = {"pipeline": pipeline} if pipeline else {}
        if run is beside:
            at_events(monkeypatch, {"sample 2": react})
            changes["rollout"] = {"http": {}}
        assert train(small_run(run, tiny_model("llama"), prompts, trainer__steps=6, **changes), resume=False) == 0
    assert_same_run(alone, beside)
    assert [answer.status_code for answer in answers] == [200, 409]
    (choice,) = answers[0].json()["choices"]
    assert choice["weight_versions"][0] >= 1
    assert "the newest are of version" in answers[1].json()["error"]["message"]
    assert not (beside / "http.json").exists()
