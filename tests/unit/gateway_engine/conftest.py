from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest
from transformers import PreTrainedModel

from gateway.engines.hf import HFEngine
from tests.fakes.tiny_models import tiny_model

OpenEngine = Callable[..., HFEngine]


@pytest.fixture
async def open_engine() -> AsyncIterator[OpenEngine]:
    """Opens engines that are closed when the test ends."""
    opened: list[HFEngine] = []

    def open_one(model: PreTrainedModel, **options: int) -> HFEngine:
        opened.append(HFEngine(model, **options))
        return opened[-1]

    yield open_one
    for engine in opened:
        await engine.close()


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """Shared: leave its weights alone."""
    return tiny_model()
