"""The Responses API over a real model: what it says depends on what it was told."""

from collections.abc import Iterator

import pytest
from openai import OpenAI
from openai.types.responses import Response

from mlx_swarm.broker.server.responses.routes import routes
from tests.server.serving import SMOLLM2, serving


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        serving(
            SMOLLM2,
            routes=routes,
            ram="256MiB",
        ) as url,
        OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def ask(client: OpenAI, text: str, previous: str | None = None) -> Response:
    return client.responses.create(
        model=SMOLLM2,
        input=text,
        instructions="You answer in one word.",
        previous_response_id=previous,
        max_output_tokens=8,
        temperature=0,
    )


def test_forks_of_a_conversation_compute_only_what_is_new(client: OpenAI) -> None:
    first = ask(client, "What is the capital of France?")
    assert first.usage is not None
    assert "Paris" in first.output_text
    for text in ("And of Italy?", "And of Spain?"):
        fork = ask(client, text, first.id)
        assert fork.usage is not None
        assert fork.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1
