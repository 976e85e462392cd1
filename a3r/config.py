"""Every setting a person or a search may write: closed, frozen, torch-free.

A default is written here and nowhere else. A typo fails with its path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from a3r.errors import UsageError

C = TypeVar("C", bound="Config")


class Config(BaseModel):
    """Base of all schemas: unknown keys are errors and values never change after construction."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def updated(self, values: Mapping[str, JsonValue]) -> Self:
        """This config with dotted `values` (`{"trainer.lr": 1e-4}`) applied and validated again.

        Raises UsageError with the path of the first value that does not fit.
        """
        tree: dict[str, Any] = self.model_dump()
        for path, value in values.items():
            *parents, leaf = path.split(".")
            node = tree
            for parent in parents:
                child = node.get(parent)
                if not isinstance(child, dict):
                    raise UsageError(f"There is no setting {path!r}", next_step=_did_you_mean(path, self))
                node = child
            if leaf not in node:
                raise UsageError(f"There is no setting {path!r}", next_step=_did_you_mean(path, self))
            node[leaf] = value
        return parsed(type(self), tree)


def parsed(kind: type[C], tree: Mapping[str, Any]) -> C:
    """`tree` as a validated `kind`. Raises UsageError that names the first bad path."""
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(str(part) for part in first["loc"])
        raise UsageError(
            f"{kind.__name__}: {path or 'value'} does not fit", why=first["msg"], next_step="correct it and try again"
        ) from error


def setting_paths(kind: type[BaseModel], *, prefix: str = "") -> list[str]:
    """Dotted paths of every leaf of a config class."""
    paths: list[str] = []
    for name, field in kind.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            paths += setting_paths(inner, prefix=f"{prefix}{name}.")
        else:
            paths.append(prefix + name)
    return paths


def _did_you_mean(path: str, config: Config) -> str:
    return "use one of " + ", ".join(sorted(setting_paths(type(config)))) + f" instead of {path}"


class TrainerConfig(Config):
    """How a policy learns."""

    lr: float = Field(default=3e-4, gt=0, le=1)
    """AdamW step size."""
    num_updates: int = Field(default=60, ge=0)
    """Policy updates in the trial; 0 measures the policy as it is."""
    batch_tasks: int = Field(default=16, ge=1)
    """Tasks (groups) a batch is made of."""
    group_size: int = Field(default=8, ge=2)
    """Episodes of one task, gathered before an advantage is computed."""
    num_minibatches: int = Field(default=4, ge=1)
    """Optimiser steps a batch is split into, by whole groups."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Temperature that training episodes sample at and that the learner applies to its logits."""
    max_reply_tokens: int = Field(default=16, ge=1)
    """Most tokens sampled in one turn of a training episode."""
    clip_low: float = Field(default=0.2, ge=0, lt=1)
    """Lower clip of the importance ratio: 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Upper clip of the importance ratio: 1 + clip_high."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the k3 KL estimate to the starting policy, in the loss."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    advantage_scale_std: bool = True
    """Divide a group's centred rewards by their standard deviation (GRPO); false is Dr. GRPO."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradient norm clip."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW weight decay."""
    max_staleness: int = Field(default=0, ge=0)
    """Most policy versions an episode may lag behind the update that trains on it."""
    loss: str | None = None
    """Import path `package.module:function` of a loss that replaces the built-in one."""
    advantage: str | None = None
    """Import path `package.module:function` of an advantage that replaces the built-in one."""
    checkpoint_every: int = Field(default=0, ge=0)
    """Updates between checkpoints; 0 writes one at the end only."""


class JudgeConfig(Config):
    """How episodes are run and how policies are measured."""

    concurrency: int = Field(default=64, ge=1)
    """Episodes in flight at once."""
    eval_tasks: int = Field(default=256, ge=8)
    """Hidden tasks a policy is measured on."""
    eval_temperature: float = Field(default=0.6, ge=0, le=2)
    """Temperature of hidden-task episodes."""
    eval_every: int = Field(default=0, ge=0)
    """Updates between interim measurements; 0 measures only at the end."""
    episode_timeout_s: float = Field(default=60.0, gt=0)
    """Wall time after which an episode is given up."""
    serial: bool = False
    """One episode and one request at a time, so that the same seed gives the same bits."""


class TrialConfig(Config):
    """One Setting with one seed: all that a swarm server and a judge need to run it."""

    model: str = "small"
    """`small`, the shipped policy, or the path of a local Hugging Face folder."""
    seed: int = Field(default=0, ge=0)
    """Seeds sampling, task order and minibatch order. Hidden tasks do not depend on it."""
    trainer: TrainerConfig = TrainerConfig()
    """How the policy learns."""
    judge: JudgeConfig = JudgeConfig()
    """How episodes are run and measured."""


_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


class Budget(Config):
    """What a campaign may spend."""

    wall_s: float = Field(default=1800.0, gt=0)
    """Wall time in seconds, from approval to report."""
    trials: int | None = Field(default=None, ge=1)
    """Most trials, or no limit."""

    @classmethod
    def parse(cls, text: str) -> Budget:
        """A budget from `wall=8m,trials=6`. Raises UsageError when it is unparsable or not positive."""
        fields: dict[str, Any] = {}
        for part in filter(None, (piece.strip() for piece in text.split(","))):
            name, _, value = part.partition("=")
            match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)", value.strip())
            if name == "wall" and match:
                fields["wall_s"] = float(match[1]) * _UNITS[match[2] or "s"]
            elif name == "trials" and match and not match[2] and value.strip().isdecimal():
                fields["trials"] = int(value)
            else:
                raise UsageError(
                    f"The budget {part!r} cannot be read",
                    why="a budget is name=amount",
                    next_step="write it like wall=8m or wall=2h,trials=12",
                )
        if not fields:
            raise UsageError("The budget is empty", next_step="write it like wall=8m or wall=2h,trials=12")
        if fields.get("wall_s") == 0 or fields.get("trials") == 0:
            raise UsageError(
                "A budget of zero allows nothing",
                next_step="give one like wall=8m; the plan says the least that would do",
            )
        return parsed(cls, fields)
