# SPDX-FileCopyrightText: 2026 The earl_jax authors
# SPDX-License-Identifier: Apache-2.0
"""python -m earl_jax.serve: runs, families of models and meshes; over gRPC, from real processes."""

import contextlib
import json
import shutil
import threading

import grpc
import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from earl_jax.engine.config import Sampling
from earl_jax.envs.text.tokenizer import load_tokenizer, save_tokenizer
from earl_jax.serve import serve_command
from earl_jax.serving.serve_flags import parse_flags, sampling
from tests.support.http_client import ask
from tests.support.references import REFERENCE, reference
from tests.support.served import (
    MODEL,
    Code,
    greedy,
    ids_of,
    prompt,
    refusal,
    request,
    sampling_metadata,
    save_parrot,
    save_run,
    saying,
    serving,
)


@pytest.mark.parametrize(
    ("flags", "defaults", "drawn"),
    [
        ((), {}, Sampling()),
        ((), {"temperature": 0.7, "top_k": 20}, Sampling(temperature=0.7, top_k=20)),
        (("--top_k=0", "--min_p=0.1"), {"top_k": 20, "top_p": 0.8}, Sampling(top_p=0.8, min_p=0.1)),
        (("--temperature=0",), {"top_k": 20, "top_p": 0.8}, Sampling(temperature=0.0)),
        (("--top_p=0.8",), {"temperature": 0.0}, Sampling(top_p=0.8)),
        ((), {"temperature": 0.0}, Sampling(temperature=0.0)),
    ],
)
def test_flags_come_before_what_the_models_files_say(flags, defaults, drawn):
    assert sampling(parse_flags(["--model=x", *flags]), defaults) == drawn


def test_a_model_whose_file_says_what_cannot_be_is_refused(tmp_path):
    folder = shutil.copytree(REFERENCE / "qwen2_tied", tmp_path / "defaults")
    (folder / "generation_config.json").write_text('{"top_p": 1.5}')
    with pytest.raises(ValueError, match="generation_config.json: top_p is 1.5; it must lie in"):
        serve_command([f"--model={folder}", "--port=0", "--grpc_port=0"])


@pytest.mark.slow
def test_the_newest_checkpoint_of_a_run_is_served_on_a_mesh(tmp_path):
    """Cut over both axes it says what one device says, to messages as the run renders them."""
    folder = tmp_path / "run"
    world, params = save_run(folder, rank=4)
    before = sorted(path for path in folder.rglob("*"))
    rendered = world.actor.renderer.render_opening(
        world.actor.renderer.opening("tic_tac_toe. you play x.")
    )
    stops = {*world.actor.renderer.end_of_turn_ids, world.actor.renderer.pad_id}
    asked = [list(rendered.ids), *(prompt(i, 5 + 14 * i) for i in range(4))]
    want = [greedy(world.origin.model, params, ids, 24, stops) for ids in asked]
    flags = ("--mesh=data=2,tensor=2", "--num_slots=4", "--temperature=0")
    flags += ("--max_prompt_tokens=64", "--max_choice_tokens=0")
    with serving(f"--workdir={folder}", *flags) as server:
        calls = [server.stub.Decode(request(ids, 24)) for ids in asked]
        assert [ids_of(call) for call in calls] == want
        assert ids_of(server.stub.Decode(request(rendered.text, 24))) == want[0]
        answer = ask(
            server.http,
            "/v1/chat/completions",
            messages=[{"role": "user", "content": "tic_tac_toe. you play x."}],
            max_tokens=24,
        )
        content = world.actor.renderer.decode(want[0])
        assert answer["choices"][0]["message"]["content"] == content
        assert answer["usage"]["prompt_tokens"] == len(rendered.ids)
        assert answer["policy_version"] == 7 and answer["model"] == str(folder)
        assert "after step 7" in server.ready_line and "data=2,tensor=2" in server.ready_line
    assert sorted(path for path in folder.rglob("*")) == before


def listen(call, sampled: list) -> None:
    """Writes down what is said until the call is cancelled."""
    with contextlib.suppress(grpc.RpcError):
        for message in call:
            sampled.append(message)


@pytest.mark.slow
def test_a_prompt_longer_than_the_first_cache_is_served(tmp_path):
    """A prompt of 40,000 tokens: the slot begins with 32,768 tokens, and grows.

    The cache has what the window needs in each of three slots: 7 pages of 64 tokens. While two
    prompts of 4,000 are read a reply beside them goes on.
    """
    save_parrot(tmp_path / "parrot", windows=(64,), max_positions=70_000)
    [x] = load_tokenizer(MODEL).encode("x")
    flags = ("--num_slots=3", "--temperature=0", "--max_choice_tokens=0")
    with serving(f"--model={tmp_path / 'parrot'}", *flags, "--max_prompt_tokens=65536") as server:
        assert "prompts of up to 65536 tokens, 70000 with their replies" in server.ready_line
        assert f" {3 * 7 * 64} tokens of KV cache in all layers (" in server.ready_line
        beside, sampled = server.stub.Decode(request("x", 60_000)), []
        sampled.append(next(beside))
        listener = threading.Thread(target=listen, args=(beside, sampled))
        listener.start()
        long = [server.stub.Decode(request([x] * 4000, 20)) for _ in range(2)]
        begun = ids_of([next(long[0])])
        assert len(ids_of(sampled)) > 20
        beside.cancel()
        listener.join()
        assert begun + ids_of(long[0]) == ids_of(long[1]) == [x] * 20
        assert ids_of(server.stub.Decode(request([x] * 40_000, 20))) == [x] * 20
        assert ids_of(server.stub.Decode(request("<", 50))) == saying()
        for prompt_tokens, count, words in (
            (65_000, 5_001, "this server has 70000: lower max_tokens to at most 5000"),
            (65_537, 1, "has 65537 tokens; this server takes at most 65536"),
        ):
            code, detail = refusal(server.stub.Decode(request([x] * prompt_tokens, count)))
            assert code == Code.INVALID_ARGUMENT and words in detail


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mesh"), [("qwen3_moe", "data=2,expert=2")])
def test_another_family_serves_the_tokens_of_transformers_drawn_as_its_file_says(
    name, mesh, tmp_path
):
    """Experts, cut over a mesh; at a temperature at which nearly all is noise.

    Of the noise top_k leaves the likeliest token to requests that say nothing.
    """
    ids = reference(name)["prompt"].ravel().tolist()
    continuation = reference(name)["continuation"].ravel().tolist()
    # A vocabulary that knows one token, which is not said.
    end = next(i for i in range(128) if i not in continuation)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": end}, "<end>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>")
    folder = shutil.copytree(REFERENCE / name, tmp_path / name)
    save_tokenizer(tokenizer, folder)
    defaults = {"do_sample": True, "temperature": 50.0, "top_k": 1, "repetition_penalty": 1.5}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    flags = (f"--mesh={mesh}", "--num_slots=4", "--max_choice_tokens=0")
    flags += (f"--max_prompt_tokens={len(ids)}",)
    with serving(f"--model={folder}", *flags) as server:
        asked = server.stub.Decode(request(ids, len(continuation)))
        beside = [server.stub.Decode(request(ids, count)) for count in range(1, 10)]
        assert ids_of(asked) == continuation
        assert [ids_of(call) for call in beside] == [continuation[:n] for n in range(1, 10)]
        hot = server.stub.Decode(request(ids, 9), metadata=sampling_metadata(top_k=0, seed=1))
        assert ids_of(hot) != continuation[:9]
        assert "temperature=50.0, top_k=1 taken for requests that say" in server.errors
        assert "repetition_penalty=1.5 not used" in server.errors
