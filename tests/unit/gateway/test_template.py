from __future__ import annotations

import pytest

from a3r.errors import EnvironmentNotReady, Refused
from gateway.template import ChatTemplate
from tests.fakes.chatml import TEMPLATE, chatml_tokenizer

U = {"role": "user", "content": "a"}


def test_a_chatml_template_preserves_its_prefix(template):
    assert template.preserves_prefix
    assert template.end_ids == template.closing_ids[:1]


def test_a_template_that_strips_old_reasoning_is_noticed_and_still_bridged():
    stripping = TEMPLATE.replace(
        "{{ message.content }}<|im_end|>",
        "{{ message.content if message.role != 'assistant' or loop.last else message.content.split('</think>')[-1] }}"
        "<|im_end|>",
    )
    template = ChatTemplate(chatml_tokenizer(template=stripping))
    assert not template.preserves_prefix
    assert template.decode(template.bridge([U], closed=True)) == "\nuser\na\nassistant\n"


def test_a_template_without_an_end_of_turn_token_is_not_served():
    with pytest.raises(EnvironmentNotReady, match="no end-of-turn token"):
        ChatTemplate(chatml_tokenizer(template="{% for m in messages %}{{ m.content }}\n{% endfor %}"))


def test_a_tokenizer_without_a_template_is_not_served():
    tokenizer = chatml_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(EnvironmentNotReady, match="chat template"):
        ChatTemplate(tokenizer)


def test_a_bridge_closes_a_reply_that_was_cut(template):
    closed, cut = template.bridge([U], closed=True), template.bridge([U], closed=False)
    assert cut == [template.closing_ids[0], *closed]


def test_a_reply_found_in_a_history_is_cut_where_sampling_would_have_begun(template):
    """A leading new line would merge with the one before it if the text were encoded in one piece."""
    reply = {"role": "assistant", "content": "\nb"}
    alone = [*template.prompt([U]), *template.reply_ids(reply)]
    assert template.prompt([U, reply, U])[: len(alone)] == alone


def test_an_error_of_the_template_is_a_refusal():
    picky = "{% if messages|length > 5 %}{{ raise_exception('too many') }}{% endif %}" + TEMPLATE
    template = ChatTemplate(chatml_tokenizer(template=picky))
    with pytest.raises(Refused, match="too many"):
        template.prompt([U] * 6)


def test_half_a_surrogate_pair_in_tool_arguments_can_be_encoded(template):
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"at": "\\ud800"}'}}
    assert template.prompt([U, {"role": "assistant", "content": None, "tool_calls": [call]}, U])
