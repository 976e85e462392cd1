from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from a3r.errors import EngineFault, UsageError
from trainer.policy import Policy, load_policy, policy_weights
from trainer.warmstart import encode_dialogues, warm_start


def dialogue(answer: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "guess the number"},
        {"role": "user", "content": "between one and twenty"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "20"},
    ]


def with_template(policy: Policy, template: str) -> Policy:
    policy.tokenizer.chat_template = template
    return policy


def test_assistant_tokens_and_their_end_token_are_trained_and_nothing_else(policy: Policy) -> None:
    (sample,) = encode_dialogues(policy, [dialogue("10")])
    trained = [token for token, mask in zip(sample.ids, sample.mask, strict=True) if mask]
    assert policy.tokenizer.decode(trained) == "10<|im_end|>20<|im_end|>"
    whole = policy.tokenizer.apply_chat_template(dialogue("10"), tokenize=False)
    assert policy.tokenizer.decode(sample.ids) == whole


def test_ids_before_a_reply_are_those_that_a_server_would_encode_for_its_prompt(policy: Policy) -> None:
    (sample,) = encode_dialogues(policy, [dialogue("10")])
    prompt = policy.tokenizer.apply_chat_template(dialogue("10")[:2], tokenize=False, add_generation_prompt=True)
    ids = policy.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    assert list(sample.ids[: len(ids)]) == ids
    assert sample.mask.index(1) == len(ids)


def test_dialogues_without_a_reply_make_no_row(policy: Policy) -> None:
    assert encode_dialogues(policy, [[{"role": "user", "content": "hi"}], []]) == []
    with pytest.raises(UsageError, match="nothing to warm-start on"):
        warm_start(policy, [], steps=1, lr=1e-3, batch_size=2, seed=0)


def test_a_template_that_rewrites_history_is_refused(policy: Policy) -> None:
    template = (
        "{% for m in messages %}{% if loop.last %}LAST {% endif %}{{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    with pytest.raises(UsageError, match="rewrites earlier messages"):
        encode_dialogues(with_template(policy, template), [dialogue("10")])


def test_a_template_without_an_end_token_is_refused(policy: Policy) -> None:
    template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    with pytest.raises(UsageError, match="without an end token"):
        encode_dialogues(with_template(policy, template), [dialogue("10")])


def test_a_warm_started_policy_says_what_the_demonstrations_say(policy: Policy) -> None:
    dialogues = [dialogue("10"), dialogue("10")[:3]]
    metrics = warm_start(policy, dialogues, steps=40, lr=3e-3, batch_size=4, seed=0)
    assert metrics["warmstart/loss_last"] < 0.2 < metrics["warmstart/loss_first"]
    prompt = policy.tokenizer.apply_chat_template(dialogue("10")[:2], tokenize=False, add_generation_prompt=True)
    ids = policy.tokenizer(prompt, add_special_tokens=False, return_tensors="pt")
    whole = policy.model.generate(**ids, max_new_tokens=5, do_sample=False, eos_token_id=policy.tokenizer.eos_token_id)
    assert policy.tokenizer.decode(whole[0, ids["input_ids"].shape[1] :]) == "10<|im_end|>"


def test_a_warm_start_is_deterministic_in_its_seed(policy: Policy) -> None:
    dialogues = [dialogue(str(number)) for number in range(8)]

    def trained(seed: int) -> dict[str, torch.Tensor]:
        fresh = load_policy(policy.folder, device="cpu")
        warm_start(fresh, dialogues, steps=3, lr=1e-2, batch_size=2, seed=seed)
        return policy_weights(fresh.model)

    first, again, other = trained(0), trained(0), trained(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


def test_a_diverging_warm_start_is_an_engine_fault(policy: Policy) -> None:
    with torch.no_grad():
        policy.model.get_output_embeddings().weight.fill_(float("nan"))
    with pytest.raises(EngineFault, match="diverged at step 0"):
        warm_start(replace(policy), [dialogue("10")], steps=2, lr=1e-3, batch_size=1, seed=0)
