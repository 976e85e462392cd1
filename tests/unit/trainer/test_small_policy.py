"""The shipped small policy: small, repeatable, and a chat model that other engines can load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from a3r.episode import Message
from flows.small_policy import syllabus
from trainer.policy import Policy, load_policy, small_policy_folder
from trainer.small_policy_build import BuildConfig, build_small_policy, train_tokenizer

DIALOGUES: list[list[Message]] = [
    [
        {"role": "user", "content": f"Guess from 1 to {n}."},
        {"role": "assistant", "content": "16"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": f"{n}"},
    ]
    for n in range(10, 40)
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<x>"}}}
CONVERSATION: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Add 1 and 2.\n"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": "3"},
    {"role": "tool", "tool_call_id": "c1", "content": "4"},
    {"role": "assistant", "content": " 3 \n"},
    {"role": "user", "content": "ünïcode ✓ 漢字"},
    {"role": "assistant", "content": "ok", "tool_calls": [CALL, CALL]},
]


@pytest.fixture(scope="module")
def shipped() -> Policy:
    return load_policy(small_policy_folder(), device="cpu")


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Message], *, ask: bool, tools: list | None) -> str:
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=ask)
    assert isinstance(text, str)
    return text


def test_folder_is_small_and_complete():
    files = {path.name: path.stat().st_size for path in small_policy_folder().iterdir()}
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 2_000_000


def test_heads_and_output_layer_suit_other_engines(shipped: Policy):
    config = json.loads((small_policy_folder() / "config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] // config["num_attention_heads"] == 64, "vLLM divides, whatever head_dim says"
    assert not config["tie_word_embeddings"]
    assert sum(parameter.numel() for parameter in shipped.model.parameters()) <= 500_000


def test_ends_are_the_same_for_tokenizer_model_and_generation(shipped: Policy):
    end = shipped.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert shipped.model.generation_config is not None
    assert shipped.tokenizer.eos_token_id == shipped.model.config.eos_token_id == end
    assert shipped.model.generation_config.eos_token_id == end
    assert shipped.tokenizer.pad_token_id not in (None, end)


def test_every_digit_is_a_token_and_all_text_comes_back(shipped: Policy):
    tokenizer = shipped.tokenizer
    assert len(tokenizer.tokenize("1234")) == 4
    for text in ("Guess 17 from 1 to 31.", " ünïcode ✓ 漢字\n\n\ttab ", "<tool_call>\n{}\n</tool_call>", "don 't , ."):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("first", [0, 1])
def test_longer_conversation_begins_with_the_shorter_one(shipped: Policy, tools: list | None, first: int):
    conversation = CONVERSATION[first:]
    whole = rendered(shipped.tokenizer, conversation, ask=False, tools=tools)
    for length in range(1, len(conversation)):
        prompt = rendered(
            shipped.tokenizer,
            conversation[:length],
            ask=conversation[length]["role"] == "assistant",
            tools=tools,
        )
        assert whole.startswith(prompt)


def test_template_writes_chatml_with_tools_and_tool_calls(shipped: Policy):
    text = rendered(shipped.tokenizer, CONVERSATION[:4], ask=True, tools=TOOLS)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n")
    assert f"<tools>\n{json.dumps(TOOLS[0])}\n</tools>" in text
    assert text.endswith(
        "<|im_start|>user\nAdd 1 and 2.\n<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<x>"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_refuses_an_unknown_role(shipped: Policy):
    with pytest.raises(Exception, match="unknown role pilot"):
        rendered(shipped.tokenizer, [{"role": "pilot", "content": "x"}], ask=True, tools=None)


def test_shipped_tokenizer_is_the_one_that_the_build_trains(shipped: Policy):
    again = train_tokenizer(syllabus(BuildConfig().seed))
    saved = (small_policy_folder() / "tokenizer.json").read_text()
    assert json.loads(again.backend_tokenizer.to_str()) == json.loads(saved)
    assert again.chat_template == shipped.tokenizer.chat_template
    assert len(again) == shipped.model.config.vocab_size == 384


def test_saved_tokenizer_is_the_trained_one(tmp_path: Path):
    trained = train_tokenizer(DIALOGUES)
    build_small_policy(DIALOGUES, tmp_path, config=BuildConfig(steps=1, batch_size=4))
    saved = load_policy(tmp_path, device="cpu").tokenizer
    for text in ("Guess 17, 'tis 1-31?\n\n  x", CONVERSATION[6]["content"]):
        assert saved(text)["input_ids"] == trained(text)["input_ids"]


def test_same_dialogues_and_config_give_the_same_bits(tmp_path: Path):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    for name in ("one", "two"):
        build_small_policy(DIALOGUES, tmp_path / name, config=BuildConfig(steps=3, batch_size=4))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads
    for path in (tmp_path / "one").iterdir():
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name
    build_small_policy(DIALOGUES, tmp_path / "other", config=BuildConfig(steps=3, batch_size=4, seed=1))
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "other")]
    assert weights[0] != weights[1]


def test_starting_policy_keeps_to_the_games_form(shipped: Policy):
    tokenizer = shipped.tokenizer
    prompt = rendered(
        tokenizer, [{"role": "user", "content": "Find my number from 1 to 31 in 5 turns."}], ask=True, tools=None
    )
    ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
    torch.manual_seed(0)
    with torch.no_grad():
        sampled = shipped.model.generate(
            ids, max_new_tokens=8, do_sample=True, temperature=0.6, top_k=0, num_return_sequences=64
        )
    replies = tokenizer.batch_decode(sampled[:, ids.shape[1] :], skip_special_tokens=True)
    assert sum(reply.isdecimal() for reply in replies) > 50
    assert len(set(replies)) > 5
