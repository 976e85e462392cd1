"""The small policy that ships with the package, made from nothing but dialogues and a seed.

A Qwen2 of two layers with a byte-level tokenizer of its own, warm-started on weak demonstrators: it follows the
games' rules and plays them badly, which is what reinforcement learning needs to begin with. Heads of 64 and an
untied output head make the same folder load in vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from a3r.episode import Message
from trainer.policy import Policy, export_policy
from trainer.warmstart import warm_start

VOCABULARY = 384
CONTEXT = 2048
"""Most positions of one conversation."""
END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_SPECIALS = (END_OF_TEXT, START, END)
"""In the order of their ids."""
_TOOL_MARKS = ("<tool_call>", "</tool_call>")
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How text is cut before merges. It is Qwen2's own pattern, which transformers puts in place for this architecture
whatever the folder says."""
_TEMPLATE = Path(__file__).resolve().parent / "small_policy.jinja"


@dataclass(frozen=True, slots=True)
class BuildConfig:
    """How long and how fast the warm start goes."""

    steps: int = 900
    lr: float = 2e-3
    batch_size: int = 32
    seed: int = 0


def build_small_policy(dialogues: Sequence[list[Message]], folder: Path, *, config: BuildConfig) -> dict[str, float]:
    """Train tokenizer and weights on `dialogues` and write them as a Hugging Face folder; the warm start's metrics.

    The same dialogues and config give the same bits on one machine. Torch's generator and thread count are left as
    they were.
    """
    tokenizer = train_tokenizer(dialogues)
    with _single_threaded(), torch.random.fork_rng(devices=()):
        torch.manual_seed(config.seed)
        policy = Policy(model=_fresh_model(tokenizer), tokenizer=tokenizer, folder=folder)
        metrics = warm_start(
            policy, dialogues, steps=config.steps, lr=config.lr, batch_size=config.batch_size, seed=config.seed
        )
    export_policy(policy, folder)
    return metrics


def train_tokenizer(dialogues: Sequence[list[Message]]) -> PreTrainedTokenizerFast:
    """Byte-level BPE over what the dialogues say, with every digit a token of its own and a ChatML template."""
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.NFC()
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(_TOOL_MARKS),
        special_tokens=list(_SPECIALS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_texts(dialogues), trainer)
    core.add_tokens([AddedToken(mark, special=False, normalized=False) for mark in _TOOL_MARKS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=END,
        pad_token=END_OF_TEXT,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=_TEMPLATE.read_text(),
    )


def _texts(dialogues: Sequence[list[Message]]) -> Iterator[str]:
    yield "system user assistant tool"
    for dialogue in dialogues:
        for message in dialogue:
            yield message["content"]


def _fresh_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    end, padding = _SPECIALS.index(END), _SPECIALS.index(END_OF_TEXT)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=padding,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=padding, do_sample=True)
    return model


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Sums in one order, whatever the machine has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
