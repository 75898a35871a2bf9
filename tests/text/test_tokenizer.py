"""Equal to transformers: ids, chat prompts and decoded text."""

from __future__ import annotations

import json
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from kvrelay.errors import InvalidRequestError, ModelError
from kvrelay.text.tokenizer import Tokenizer
from tests.text.tiny_tokenizers import CHATML, CORPUS, RICH, SPECIAL, folder_of

KINDS = ["byte_level", "sentence_piece", "word_piece"]
TEXTS = [*CORPUS, "", " ", "\n\n", "<|im_start|>user", "a<tool_call>b", "tab\tand nul\x00", "🙂" * 5]
TOOL = {"type": "function", "function": {"name": "f", "description": 'a "quoted" <b>', "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "  Hello <b>you</b>  "}
ASSISTANT = {"role": "assistant", "content": "Well, "}
CALLING = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"é": 1}}}],
}


LOADED: dict[str, Tokenizer] = {}


def reference(folder: pathlib.Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_encodes_and_decodes_as_transformers(kind: str) -> None:
    ours, theirs = Tokenizer.load(folder_of(kind)), reference(folder_of(kind))
    for text in TEXTS:
        for special in (False, True):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs(text, add_special_tokens=special).input_ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special, clean_up_tokenization_spaces=False
            )
    assert ours.encode_batch(TEXTS) == [ours.encode(text) for text in TEXTS]
    assert ours.vocab_size == len(theirs)
    assert ours.eos_token_id == theirs.eos_token_id


@pytest.mark.parametrize("template", [CHATML, RICH])
@pytest.mark.parametrize("messages", [[USER], [USER, ASSISTANT, USER], [ASSISTANT, {**ASSISTANT, "reasoning": "hm"}]])
@pytest.mark.parametrize("generation_prompt", [False, True])
def test_renders_chats_as_transformers(template: str, messages: list[dict[str, Any]], generation_prompt: bool) -> None:
    folder = folder_of("byte_level", template)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    text = ours.render_chat(messages, add_generation_prompt=generation_prompt)
    assert text == theirs.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=False)
    ids = theirs.apply_chat_template(messages, add_generation_prompt=generation_prompt, tokenize=True, return_dict=False)
    assert ours.encode(text, add_special_tokens=False) == ids


def test_renders_tools_and_calls_as_transformers() -> None:
    folder = folder_of("byte_level", RICH)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    messages = [USER, {**CALLING, "content": ""}, {"role": "tool", "content": "3"}]
    expected = theirs.apply_chat_template(messages, tools=[TOOL], add_generation_prompt=True, tokenize=False)
    assert ours.render_chat(messages, tools=[TOOL]) == expected
    assert ours.takes_tools
    assert not Tokenizer.load(folder_of("byte_level", CHATML)).takes_tools


@pytest.mark.parametrize("template", [CHATML, RICH, CHATML.replace("message['content']", "message['content'].strip()")])
def test_continues_the_final_message_as_transformers(template: str) -> None:
    folder = folder_of("byte_level", template)
    ours, theirs = Tokenizer.load(folder), reference(folder)
    text = ours.render_chat([USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)
    expected = theirs.apply_chat_template(
        [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True, tokenize=False
    )
    assert text == expected
    assert text.rstrip().endswith("Well,")


@pytest.mark.parametrize(
    ("template", "messages"),
    [
        (RICH, [{"role": "nobody", "content": "x"}]),
        (CHATML, [{"role": "user", "content": None}]),
        (CHATML, [{"role": "user", "content": ["x"]}]),
        ("{% for m in messages %}{{ m.content / 0 }}{% endfor %}", [USER]),
        ("{{ messages[0].content.__class__.__mro__ }}{{ messages[0].nothing.at_all }}", [USER]),
    ],
)
def test_what_a_template_refuses_is_an_error_that_names_messages(template: str, messages: list[dict[str, Any]]) -> None:
    tokenizer = Tokenizer.load(folder_of("byte_level", template))
    with pytest.raises(InvalidRequestError) as caught:
        tokenizer.render_chat(messages)
    assert caught.value.param == "messages"


def test_template_files_come_before_the_config(tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder_of("byte_level"), tmp_path, dirs_exist_ok=True)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert Tokenizer.load(tmp_path).render_chat([USER]) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja")
    assert Tokenizer.load(tmp_path).render_chat([USER]) == "jinja"


def test_a_named_tool_template_is_used_for_tools(tmp_path: pathlib.Path) -> None:
    shutil.copytree(folder_of("byte_level"), tmp_path, dirs_exist_ok=True)
    templates = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.render_chat([USER]), tokenizer.render_chat([USER], tools=[TOOL])) == ("plain", "tools")


def test_broken_checkpoints_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.load(tmp_path)
    shutil.copy(folder_of("byte_level") / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer.load(tmp_path)


PARTS = st.lists(
    st.sampled_from([*SPECIAL, "<tool_call>", "added word", "<|im_", "|>", " ", "\n", "user", "é🙂", "1234"]), max_size=12
)


@pytest.mark.parametrize("kind", KINDS)
@given(parts=PARTS, text=st.text(max_size=10))
def test_chats_are_tokenised_as_any_text(kind: str, parts: list[str], text: str) -> None:
    tokenizer = Tokenizer.load(folder_of(kind)) if kind not in LOADED else LOADED[kind]
    LOADED[kind] = tokenizer
    for chat in ("".join(parts), text.join(parts), f"<|im_start|>{text}<|im_end|>\n{'long ' * 600}"):
        for _ in range(2):  # the second time, parts are remembered
            assert tokenizer.encode_chat(chat) == tokenizer.encode(chat, add_special_tokens=False)


def test_token_bytes_join_to_the_text() -> None:
    tokenizer = Tokenizer.load(folder_of("byte_level"))
    tokens = tokenizer.encode("naïve 東京 🙂<|im_end|>", add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, tokens)).decode() == "naïve 東京 🙂<|im_end|>"
    assert tokenizer.token_text(2) == "<|im_end|>"


def test_text_package_imports_neither_torch_nor_transformers() -> None:
    program = "import sys, kvrelay.text.detokenizer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
