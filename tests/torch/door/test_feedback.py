"""Votes of people on answers of the door."""

import json
from pathlib import Path

import aiohttp
import pytest
from chats import TOKEN, Served, serving

from rlhfspec.runs.folder.run_folder import RunFolder

ASK = [{"role": "user", "content": "2+2="}]


async def voted(served: Served, **body: str) -> tuple[int, str]:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{served.url}/feedback", json=body) as answer,
    ):
        return answer.status, await answer.text()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_vote_is_kept_with_all_that_makes_its_answer_again(tmp_path: Path, streams: bool) -> None:
    async with serving(run=RunFolder(tmp_path)) as served:
        create = served.client.chat.completions.create
        asked = {"model": "policy", "messages": ASK, "temperature": 0.5, "max_tokens": 9, "seed": 4, "logprobs": True}
        whole = await create(**asked, extra_body={"return_token_ids": True})  # type: ignore[call-overload]
        id, choice = whole.id, whole.choices[0].model_dump()
        if streams:
            id = [chunk async for chunk in await create(**asked, stream=True)][-1].id  # type: ignore[call-overload]
        assert (await voted(served, id=id, vote="down", against="other"))[0] == 200
        assert (await voted(served, id=id, vote="up"))[0] == 200
        down, up = (json.loads(line) for line in (tmp_path / "feedback.jsonl").read_text().splitlines())
        assert (down["vote"], down["against"], up["vote"], up["against"]) == ("down", "other", "up", None)
        assert (down["id"], down["policy"], down["messages"]) == (id, "tiny", ASK)
        assert down["answer"] == {"role": "assistant", "content": choice["message"]["content"]}
        for name in ("prompt_token_ids", "token_ids", "weights_versions", "seed", "finish_reason"):
            assert down[name] == choice[name]
        assert down["tempered_log_probs"] == [each["logprob"] for each in choice["logprobs"]["content"]]
        assert down["log_probs"] == choice["logprobs"]["untempered"]
        assert (down["params"]["temperature"], down["params"]["max_tokens"]) == (0.5, 9)


async def test_a_vote_that_cannot_be_kept_is_refused(tmp_path: Path) -> None:
    async with serving() as served:
        status, text = await voted(served, id="x", vote="up")
        assert (status, "serves no run" in text) == (404, True)
    async with serving(run=RunFolder(tmp_path)) as served:
        for body, said in (({"id": "x", "vote": "up"}, "id: is not among"), ({"id": "x", "vote": "5"}, "vote: ")):
            status, text = await voted(served, **body)
            assert status == 400
            assert said in text
    assert not (tmp_path / "feedback.jsonl").exists()
