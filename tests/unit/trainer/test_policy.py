from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM

from a3r.errors import EnvironmentNotReady, UsageError
from trainer.policy import (
    Policy,
    export_policy,
    load_policy,
    policy_weights,
    reset_policy,
    resolve_model,
    small_policy_folder,
    token_logprobs,
)


def test_a_loaded_policy_is_float32_and_trainable(policy: Policy) -> None:
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert all(parameter.requires_grad for parameter in policy.model.parameters())
    assert not policy.model.training


def test_small_names_the_shipped_folder() -> None:
    assert small_policy_folder().parent.name == "trainer"
    assert small_policy_folder().name == "small_policy"


def test_a_missing_folder_is_an_environment_that_is_not_ready(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentNotReady, match="never downloaded"):
        resolve_model(str(tmp_path / "nowhere"))


def test_a_folder_without_a_config_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json"):
        load_policy(tmp_path)


def test_a_model_with_missing_weights_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "holes"
    shutil.copytree(policy_folder, folder)
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lm_head\.weight"):
        load_policy(folder)


def test_a_model_that_transforms_its_logits_is_refused(policy_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "capped"
    shutil.copytree(policy_folder, folder)
    config = Gemma2Config(
        vocab_size=320, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=32, final_logit_softcapping=0.1,
    )  # fmt: skip
    Gemma2ForCausalLM(config).save_pretrained(folder)
    with pytest.raises(UsageError, match="transforms its logits"):
        load_policy(folder)


@pytest.mark.parametrize("kind", ["policy_folder", "tied_folder"])
def test_reset_restores_the_starting_weights_bit_for_bit_in_the_same_tensors(
    kind: str, request: pytest.FixtureRequest
) -> None:
    policy = load_policy(request.getfixturevalue(kind), device="cpu")
    before = {name: tensor.clone() for name, tensor in policy_weights(policy.model).items()}
    addresses = {name: tensor.data_ptr() for name, tensor in policy_weights(policy.model).items()}
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(torch.randn_like(parameter))
    reset_policy(policy)
    after = policy_weights(policy.model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert {name: tensor.data_ptr() for name, tensor in after.items()} == addresses


@pytest.mark.parametrize("kind", ["policy_folder", "tied_folder"])
def test_an_exported_policy_loads_again_with_the_same_bits_and_template(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    policy = load_policy(request.getfixturevalue(kind), device="cpu")
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.1)
    for _ in range(2):
        export_policy(policy, tmp_path / "out")
    again = load_policy(tmp_path / "out", device="cpu")
    theirs = policy_weights(again.model)
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in policy_weights(policy.model).items())
    assert again.tokenizer.chat_template == policy.tokenizer.chat_template
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_token_logprobs_are_those_of_the_whole_model_at_the_temperature(policy: Policy) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9], [15, 16, 17, 0, 0]])
    scores = token_logprobs(
        policy.model, ids, torch.tensor([1, 3, 6]), torch.tensor([7, 9, 17]), temperature=0.7
    ).tolist()
    logprobs = torch.log_softmax(AutoModelForCausalLM.from_pretrained(policy.folder)(ids).logits / 0.7, dim=-1)
    assert scores == pytest.approx(
        [logprobs[0, 1, 7].item(), logprobs[0, 3, 9].item(), logprobs[1, 1, 17].item()], abs=1e-6
    )
