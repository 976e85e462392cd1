"""Policies: a causal language model, its tokenizer, and the folder that its starting weights came from.

The module is shared: the inference engine samples from the very parameters that the learner updates, so every
change of weights happens in place.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from a3r.errors import EnvironmentNotReady, UsageError

SMALL = "small"
"""Name of the shipped policy."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Trainable weights in float32, evaluation mode, with the tokenizer and the Hugging Face folder of origin."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    folder: Path

    @property
    def device(self) -> torch.device:
        return self.model.device


def small_policy_folder() -> Path:
    """Folder of the policy that ships with the package."""
    return Path(__file__).resolve().parent / "small_policy"


def resolve_model(model: str) -> Path:
    """Folder of `model`: `small`, or the path of a local Hugging Face folder.

    Raises EnvironmentNotReady when there is no such folder and UsageError when it holds no model.
    """
    folder = small_policy_folder() if model == SMALL else Path(model).expanduser().resolve()
    if not folder.is_dir():
        raise EnvironmentNotReady(
            f"There is no model folder {folder}",
            why="models are read from local folders and never downloaded",
            next_step="give `small` or the path of a Hugging Face causal-LM folder",
        )
    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is not a Hugging Face model folder",
            why="it has no config.json",
            next_step="give a folder written by save_pretrained",
        )
    return folder


def load_policy(folder: Path, *, device: str = "auto") -> Policy:
    """Any local causal-LM folder as a Policy on `device` (`auto`: CUDA where torch sees a GPU, else CPU).

    Raises EnvironmentNotReady when the folder is missing and UsageError when it is no model that can be trained here.
    """
    folder = resolve_model(str(folder))
    target = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"The tokenizer in {folder} cannot be read", why=str(error)) from error
    model = _read_model(folder)
    nn.Module.to(model, target)
    _check_head(model, folder=folder)
    return Policy(model=model, tokenizer=tokenizer, folder=folder)


def _read_model(folder: Path) -> PreTrainedModel:
    try:
        with _without_progress_bar():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True, output_loading_info=True
            )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise UsageError(f"The model in {folder} cannot be read", why=str(error)) from error
    model, report = loaded
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        # transformers would fill these with random numbers and only warn.
        raise UsageError(f"The model in {folder} is incomplete", why=f"no fitting weights for {', '.join(wrong[:5])}")
    return model.eval().requires_grad_(True)


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    was_enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            transformers_logging.enable_progress_bar()


def _check_head(model: PreTrainedModel, *, folder: Path) -> None:
    """Refuse models whose logits are more than head(hidden): the learner computes logits at few positions only."""
    probe = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        whole = model(input_ids=probe, use_cache=False).logits[0]
        ours = next_token_logits(model, probe, torch.arange(4, device=model.device), temperature=1.0)
    if not torch.equal(whole, ours):
        raise UsageError(
            f"The model in {folder} cannot be trained",
            why=f"{type(model).__name__} transforms its logits after the output head",
            next_step="use a model such as Qwen2, Qwen3, Llama or SmolLM2",
        )


def policy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that make up `model`, by name; tied ones once. They are the live tensors, not copies."""
    return dict(model.named_parameters())


def copy_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> None:
    """Overwrite the parameters of `model` in place. Raises UsageError unless names and shapes are the same."""
    ours = policy_weights(model)
    theirs = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    if theirs != {name: tuple(tensor.shape) for name, tensor in ours.items()}:
        raise UsageError("The weights belong to another model", why="names or shapes of its parameters differ")
    with torch.no_grad():
        for name, tensor in ours.items():
            tensor.copy_(weights[name])


def restore_weights(policy: Policy, folder: Path) -> None:
    """Overwrite the policy's weights, in place and bit for bit, with those of a model folder of the same shape."""
    copy_weights(policy.model, policy_weights(_read_model(folder)))
    policy.model.zero_grad(set_to_none=True)
    policy.model.eval()


def reset_policy(policy: Policy) -> None:
    """Restore the starting weights of the policy's own folder into the same module, bit-identical."""
    restore_weights(policy, policy.folder)


def export_policy(policy: Policy, folder: Path) -> Path:
    """Write weights, config and tokenizer as a Hugging Face folder. Files of an earlier export are replaced whole."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as draft:
        policy.model.save_pretrained(draft)
        policy.tokenizer.save_pretrained(draft)
        for path in sorted(Path(draft).iterdir()):
            path.replace(folder / path.name)
    return folder


def next_token_logits(model: PreTrainedModel, inputs: Tensor, predecessors: Tensor, *, temperature: float) -> Tensor:
    """Logits of the token after each chosen position, divided by `temperature`: [N, V].

    `inputs` [B, T] are right-padded ids; `predecessors` [N] index the flattened inputs. Padding lies after every
    chosen position of its row, so causal attention needs no mask, and the head runs on N positions instead of B*T.
    Raises UsageError for a model without an output head.
    """
    body: nn.Module = model.base_model
    head: nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise UsageError(f"{type(model).__name__} has no output head", next_step="give a causal language model")
    hidden = body(input_ids=inputs, use_cache=False).last_hidden_state  # [B, T, H]
    chosen = hidden.flatten(0, 1).index_select(0, predecessors)  # [N, H]
    logits = head(chosen)
    return logits if temperature == 1.0 else logits / temperature


def token_logprobs(
    model: PreTrainedModel, inputs: Tensor, predecessors: Tensor, targets: Tensor, *, temperature: float
) -> Tensor:
    """Natural log-probability of `targets` [N] after the positions `predecessors`, at `temperature`: [N]."""
    return logprobs_of(next_token_logits(model, inputs, predecessors, temperature=temperature), targets)


def logprobs_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Natural log-probability of `targets` [N] under `logits` [N, V]: [N]."""
    return torch.log_softmax(logits, dim=-1).gather(1, targets[:, None]).squeeze(1)
