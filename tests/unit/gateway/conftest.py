from __future__ import annotations

import pytest

from gateway.template import ChatTemplate
from tests.fakes.chatml import chatml_tokenizer


@pytest.fixture(scope="session")
def template() -> ChatTemplate:
    return ChatTemplate(chatml_tokenizer())
