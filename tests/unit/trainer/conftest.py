"""A tiny random policy with a tokenizer of its own, and episodes sampled from it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from a3r.episode import Episode, EpisodeKind, FinishReason, Group, Turn
from trainer.policy import Policy, load_policy, token_logprobs

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["guess the number between one and twenty", "user assistant system higher lower"], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )


def tiny_model(vocab_size: int, *, tied: bool = False) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        tie_word_embeddings=tied,
        max_position_embeddings=512,
        initializer_range=0.2,
    )
    return Qwen2ForCausalLM(config)


@pytest.fixture(scope="session")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tied_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tied"
    tokenizer = tiny_tokenizer()
    tokenizer.save_pretrained(folder)
    tiny_model(len(tokenizer), tied=True).save_pretrained(folder)
    return folder


@pytest.fixture
def policy(policy_folder: Path) -> Policy:
    torch.set_num_threads(1)
    return load_policy(policy_folder, device="cpu")


MakeGroup = Callable[..., Group]


@pytest.fixture
def make_group(policy: Policy) -> MakeGroup:
    """Episodes of random tokens whose logprobs are the policy's own, plus `noise`."""

    def logprobs(prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
        ids = torch.tensor([prompt + sampled])
        before = torch.arange(len(prompt) - 1, len(prompt) + len(sampled) - 1)
        with torch.no_grad():
            scores = token_logprobs(policy.model, ids, before, torch.tensor(sampled), temperature=temperature)
        return scores.tolist()

    def make(
        task_id: str,
        rewards: list[float],
        *,
        num_turns: int = 3,
        seed: int = 0,
        version: int = 0,
        temperature: float = 1.0,
        noise: float = 0.0,
        policy_name: str = "tiny",
    ) -> Group:
        draw = random.Random(f"{task_id}:{seed}")

        def tokens(low: int, high: int) -> list[int]:
            return [draw.randrange(3, 300) for _ in range(draw.randint(low, high))]

        episodes = []
        prompt = tokens(6, 12)
        for number, reward in enumerate(rewards):
            episode_id = f"{task_id}.{number}"
            history, turns = list(prompt), []
            for index in range(num_turns):
                sampled = tokens(1, 5)
                scores = [value + draw.gauss(0, noise) for value in logprobs(history, sampled, temperature)]
                turns.append(
                    Turn(
                        episode_id=episode_id,
                        index=index,
                        prompt_ids=tuple(history),
                        sampled_ids=tuple(sampled),
                        logprobs=tuple(scores),
                        finish_reason=FinishReason.STOP,
                        policy=policy_name,
                        version=version,
                        temperature=temperature,
                    )
                )
                history += sampled + tokens(2, 6)
            episodes.append(Episode(episode_id, task_id, EpisodeKind.TRAIN, "tiny", reward, tuple(turns)))
        return Group(task_id, tuple(episodes))

    return make
