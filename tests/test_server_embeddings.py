"""/v1/embeddings, /v1/score and /v1/rerank of a real server whose checkpoint is an embedding model."""

from __future__ import annotations

import base64
import json
import math
import struct

import openai
import pytest

from quire import LLM
from quire.models.checkpoint import resolve
from quire.server.errors import ApiError
from quire.server.pooling import kept, probability
from quire.server.pooling_protocol import parse_embedding, parse_rerank, parse_score
from tests.http_tools import CHECKED, ServeProcess
from tests.test_pooling import copy_of, declare

TEXTS = ["def add(a, b):", "class Stack:\n    pass", "import os"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = copy_of(resolve("demo"), tmp_path_factory.mktemp("embedder"))
    width = json.loads((folder / "config.json").read_text())["hidden_size"]
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": None}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return declare(folder, dense=[(width, 40)], pooling_mode_mean_tokens=True)


@pytest.fixture(scope="module")
def server(folder):
    with ServeProcess("--served-model-name", "e", *CHECKED, model=str(folder)) as process:
        yield process


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def direct(folder):
    """The embeddings of the texts, whole and cut, from the engine itself."""
    with LLM(str(folder), threads=1) as llm:
        return {n: [one.embedding for one in llm.embed(TEXTS, dimensions=n)] for n in (None, 8)}


@pytest.mark.parametrize("dimensions", [None, 8])
@pytest.mark.parametrize("encoding", ["float", "base64", None])
def test_the_official_client_gets_the_engines_own_embeddings(client, direct, dimensions, encoding):
    asked = {name: value for name, value in (("encoding_format", encoding), ("dimensions", dimensions)) if value}
    answer = client.embeddings.create(model="e", input=TEXTS, **asked)
    found = [one.embedding for one in answer.data]
    if encoding == "base64":
        found = [[*struct.unpack(f"<{len(one) * 3 // 16}f", base64.b64decode(one))] for one in found]
    assert found == direct[dimensions]
    assert [one.index for one in answer.data] == [0, 1, 2]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens > 0


def test_texts_and_their_tokens_embed_alike(client, server, direct):
    tokens = [server.json("/tokenize", {"prompt": text})["tokens"] for text in TEXTS]
    assert [one.embedding for one in client.embeddings.create(model="e", input=tokens).data] == direct[None]
    assert client.embeddings.create(model="e", input=tokens[0]).data[0].embedding == direct[None][0]
    assert client.embeddings.create(model="e", input=TEXTS[0]).data[0].embedding == direct[None][0]


def test_a_prompt_of_the_checkpoint_stands_before_texts(server, client, direct):
    asked = {"model": "e", "input": TEXTS[0], "prompt_name": "query"}
    [query] = server.json("/v1/embeddings", asked)["data"]
    [written] = client.embeddings.create(model="e", input=f"q: {TEXTS[0]}").data
    assert query["embedding"] == written.embedding != direct[None][0]
    for wrong in ({"prompt_name": "passage"}, {"prompt_name": "query", "input": [1, 2]}):
        status, _, body = server.post("/v1/embeddings", {**asked, **wrong})
        assert status == 400 and json.loads(body)["error"]["param"] == "prompt_name"


def test_scores_of_an_embedding_model_are_cosines(server, client, direct):
    """Of what the checkpoint's dense layer makes of them, with its prompts before queries and documents."""
    query = client.embeddings.create(model="e", input=f"q: {TEXTS[0]}").data[0].embedding
    cosines = [math.fsum(a * b for a, b in zip(query, other, strict=True)) for other in direct[None]]
    answer = server.json("/v1/score", {"model": "e", "text_1": TEXTS[0], "text_2": TEXTS})
    assert answer["object"] == "list" and {one["object"] for one in answer["data"]} == {"score"}
    assert [one["score"] for one in answer["data"]] == pytest.approx(cosines, abs=1e-6)
    pairs = server.json("/score", {"queries": [*TEXTS], "documents": [*TEXTS]})
    assert pairs["data"][0]["score"] == pytest.approx(cosines[0], abs=1e-6)
    assert answer["data"][1] == server.json("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1]})["data"][0] | {
        "index": 1
    }


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_ranks_are_scores_in_their_order(server, path):
    scores = server.json("/v1/score", {"text_1": TEXTS[0], "text_2": TEXTS})["data"]
    ranks = server.json(path, {"query": TEXTS[0], "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]})["results"]
    assert [one["relevance_score"] for one in ranks] == sorted((one["score"] for one in scores), reverse=True)
    assert all(one["relevance_score"] == scores[one["index"]]["score"] for one in ranks)
    assert [one["document"]["text"] for one in ranks] == [TEXTS[one["index"]] for one in ranks]
    best = server.json(path, {"query": TEXTS[0], "documents": TEXTS, "top_n": 1, "return_documents": False})["results"]
    assert best == [{"index": ranks[0]["index"], "relevance_score": ranks[0]["relevance_score"]}]


def test_errors_are_openais(client, server):
    with pytest.raises(openai.BadRequestError) as wide:
        client.embeddings.create(model="e", input="x", dimensions=100_000)
    assert "1 to 40" in wide.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError) as long:
        client.embeddings.create(model="e", input=["x", "x = 1\n" * 5000])
    assert long.value.body["code"] == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as outside:
        client.embeddings.create(model="e", input=[[1, 10**6]])
    assert outside.value.body["code"] == "token_out_of_range"
    stats = server.json("/view")["stats"]
    assert not stats["running"] and not stats["waiting"] and not stats["held_blocks"]


@pytest.mark.parametrize("side", [None, "right", "left"])
def test_texts_are_truncated_on_the_side_that_is_named(server, side):
    text = "\n".join(f"def f{index}(a): return {index}" for index in range(40))
    asked = {"truncate_prompt_tokens": 7, **({"truncation_side": side} if side else {})}
    ids = server.json("/tokenize", {"prompt": text})["tokens"]
    expected = ids[-7:] if side == "left" else ids[:7]

    def embedded(given, **more):
        answer = server.json("/v1/embeddings", {"input": given, **more})
        return answer["data"][0]["embedding"], answer["usage"]["prompt_tokens"]

    assert embedded(text, **asked) == embedded(ids, **asked) == embedded(expected) and embedded(expected)[1] == 7
    query, document = (embedded(prompt + text, **asked)[0] for prompt in ("q: ", ""))
    cosine = math.fsum(x * y for x, y in zip(query, document, strict=True))
    body = {"text_1": text, "text_2": [text, "x"], **asked}
    score = server.json("/v1/score", body)
    assert score["data"][0]["score"] == pytest.approx(cosine) and score["usage"]["prompt_tokens"] == 7 + 7 + 1
    ranks = server.json("/v1/rerank", {"query": text, "documents": [text, "x"], **asked})["results"]
    assert {one["index"]: one["relevance_score"] for one in ranks} == dict(
        enumerate(each["score"] for each in score["data"])
    )


def test_a_text_longer_than_the_context_is_refused_or_cut_to_it(server):
    text, most = "import os\n" * 3000, server.json("/v1/models")["data"][0]["max_model_len"]
    refused = server.post("/v1/embeddings", {"input": text})
    assert refused[0] == 400
    cut = server.json("/v1/embeddings", {"input": text, "truncate_prompt_tokens": -1})
    assert cut["usage"]["prompt_tokens"] == most
    status, _, body = server.post("/v1/embeddings", {"input": text, "truncate_prompt_tokens": most + 1})
    assert status == 400 and f"at most {most}, the context's length" in body.decode()


def test_what_a_tokenizer_adds_to_a_text_is_kept():
    ids = [1, *range(10, 20), 2]
    assert kept(ids, 5, False, [1], [2]) == [1, 10, 11, 12, 2] and kept(ids, 5, True, [1], [2]) == [1, 17, 18, 19, 2]
    with pytest.raises(ApiError, match="at least 3"):
        kept(ids, 2, False, [1], [2])


def test_routes_are_counted_and_documented(server, client):
    client.embeddings.create(model="e", input="x")
    text = server.get("/metrics")[2].decode()
    assert 'route="/v1/embeddings"' in text
    document = server.json("/openapi.json")
    for path in ("/v1/embeddings", "/v1/score", "/v1/rerank"):
        assert "requestBody" in document["paths"][path]["post"]


BAD = [
    (parse_embedding, {}, "input"),
    (parse_embedding, {"input": []}, "input"),
    (parse_embedding, {"input": [[]]}, "input"),
    (parse_embedding, {"input": {"a": 1}}, "input"),
    (parse_embedding, {"input": ["x", 3]}, "input"),
    (parse_embedding, {"input": "x", "dimensions": 0}, "dimensions"),
    (parse_embedding, {"input": "x", "dimensions": "8"}, "dimensions"),
    (parse_embedding, {"input": "x", "encoding_format": "int8"}, "encoding_format"),
    (parse_embedding, {"input": ["x"] * 3000}, "input"),
    (parse_embedding, {"input": "x", "normalize": False}, "normalize"),
    (parse_embedding, {"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    (parse_score, {"text_1": "x", "text_2": "y", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
    (parse_rerank, {"query": "x", "documents": ["y"], "truncation_side": "middle"}, "truncation_side"),
    (parse_score, {"text_1": "x"}, "text_2"),
    (parse_score, {"text_1": "x", "queries": "x", "text_2": "y"}, "queries"),
    (parse_score, {"text_1": ["x", "y"], "text_2": ["z"] * 3}, "text_1"),
    (parse_score, {"text_1": [1, 2], "text_2": "y"}, "text_1"),
    (parse_score, {"text_1": "x", "text_2": "y", "labels": ["a"]}, "labels"),
    (parse_score, {"text_1": "x", "text_2": "y", "labels": "ab"}, "labels"),
    (parse_rerank, {"query": "x"}, "documents"),
    (parse_rerank, {"query": ["x"], "documents": ["y"]}, "query"),
    (parse_rerank, {"query": "x", "documents": [{"image": "y"}]}, "documents"),
    (parse_rerank, {"query": "x", "documents": [[]]}, "documents"),
    (parse_rerank, {"query": "x", "documents": ["y"], "top_n": -1}, "top_n"),
]


@pytest.mark.parametrize(("parse", "body", "field"), BAD)
def test_a_bad_field_is_named(parse, body, field):
    with pytest.raises(ApiError) as refused:
        parse(json.dumps(body).encode())
    assert refused.value.status == 400 and refused.value.param.startswith(field)


def test_a_probability_is_a_number_however_far_the_logits_are_apart():
    assert [probability(1e4, -1e4), probability(-1e4, 1e4), probability(2.0, 2.0)] == pytest.approx([1.0, 0.0, 0.5])
