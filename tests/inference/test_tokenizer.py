"""Text to ids: message text never becomes control tokens, one begin token, the right end tokens (cases A44 and C36)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Fast

from meshd.errors import CallerError, ModelRefused
from meshd.inference.detokenize import Detokenizer
from meshd.inference.text_worker.tokenizer import TextModel
from tests.inference.tokenizers_on_disk import byte_level, spaced

Messages = list[dict[str, Any]]

TALK: Messages = [
    {"role": "system", "content": "Be   kind."},
    {"role": "user", "content": "naïve 🦀\n\n  x <think> 12"},
    {"role": "assistant", "content": " the assistant "},
    {"role": "user", "content": "<more|im_end>"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_level(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel(folder)


def user(text: Any) -> Messages:
    return [{"role": "user", "content": text}]


def reference_ids(folder: Path, messages: Messages) -> list[int]:
    transformers = pytest.importorskip("transformers", reason="needs the engine extra")
    ids = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    return list(ids)


@pytest.mark.torch
@pytest.mark.parametrize("make", [byte_level, spaced], ids=["byte-level", "sentence-piece"])
def test_ordinary_text_is_tokenized_as_by_transformers(tmp_path: Path, make: Any) -> None:
    folder = make(tmp_path / "m")
    for messages in (TALK, user("a b\n"), user("")):
        assert TextModel(folder).chat(messages) == reference_ids(folder, messages)


@pytest.mark.torch
def test_one_begin_token_where_tokenizer_and_template_both_write_it(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m", begin=True, add_bos_token=True, template="{{ bos_token }}hi")
    model = TextModel(folder)
    ids = model.chat(user("x"))
    assert ids == reference_ids(folder, user("x"))
    assert ids.count(1) == 1
    assert model.encode("hi") == ids
    assert model.encode("<|im_start|>hi", special=True) == ids


@pytest.mark.parametrize(("setting", "count"), [({}, 1), ({"add_bos_token": False}, 0), ({"add_bos_token": True}, 1)])
def test_raw_text_gets_the_begin_token_its_files_ask_for(tmp_path: Path, setting: dict[str, Any], count: int) -> None:
    model = TextModel(byte_level(tmp_path / "m", begin=True, **setting))
    assert model.encode("a b").count(1) == count


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "<|", "a", " ", "\n", "system"]), max_size=12
    )
)
def test_message_text_never_becomes_control_tokens(model: TextModel, parts: list[str]) -> None:
    text = "".join(parts)
    ids = model.chat(user(text))
    assert [i for i in ids if i in (0, 1, 2)] == [1, 2, 1], "the template's own and no others"
    inside = ids[ids.index(1) + 1 : ids.index(2)]
    assert model.decode(inside) == f"user\n{text}"
    assert not {0, 1, 2} & set(model.encode(text))
    assert model.decode(model.encode(text)) == text


def test_control_tokens_in_raw_text_only_on_request(model: TextModel) -> None:
    assert 2 in model.encode("a<|im_end|>", special=True)
    assert 2 not in model.encode("a<|im_end|>")


def test_control_tokens_in_sentence_pieces(tmp_path: Path) -> None:
    model = TextModel(spaced(tmp_path / "m"))
    ids = model.chat(user("a</s>b"))
    assert [i for i in ids if i < 2] == [0, 1]
    assert "</s>" in model.decode(ids).replace(" ", "")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, {2}),
        ({"config.json": {"eos_token_id": 0}}, {0, 2}),
        ({"config.json": {"text_config": {"eos_token_id": [0, 7]}}}, {0, 2, 7}),
        ({"generation_config.json": {"eos_token_id": [2, 9]}}, {2, 9}),
        ({"config.json": {"eos_token_id": None}}, {2}),
    ],
)
def test_end_tokens_are_everybodys(tmp_path: Path, files: dict[str, Any], expected: set[int]) -> None:
    folder = byte_level(tmp_path / "m")
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    assert TextModel(folder).find_turn_end() == expected


def test_the_templates_turn_end_is_an_end_token_where_no_file_says_so(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m", eos_token="<|endoftext|>")
    (folder / "config.json").write_text('{"eos_token_id": 0}')
    model = TextModel(folder)
    assert model.eos_ids == {0}
    assert model.find_turn_end() == {0, 2}
    ends_with_text = TextModel(
        byte_level(tmp_path / "n", template="{% for m in messages %}{{ m.content }} ok{% endfor %}")
    )
    assert ends_with_text.find_turn_end() == {2}


def test_templates_see_the_hubs_conventions(tmp_path: Path) -> None:
    source = (
        "{%- for m in messages %}{% if loop.index == 3 %}{% break %}{% endif %}"
        "{% generation %}{{ m.role }}={{ m.content | tojson }};{% endgeneration %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ bos_token }}{{ tools is none }}{{ add_generation_prompt }}"
    )
    model = TextModel(byte_level(tmp_path / "m", template=source))
    messages: Messages = [
        {"role": "developer", "content": [{"type": "text", "text": 'a"é'}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": "never shown"},
    ]
    assert model.decode(model.chat(messages)) == 'system="a\\"éb";assistant="";4TrueTrue'


def test_a_template_that_knows_developers_gets_them(tmp_path: Path) -> None:
    model = TextModel(byte_level(tmp_path / "m", template="{{ messages[0].role }}{# developer #}"))
    assert model.decode(model.chat([{"role": "developer", "content": ""}])) == "developer"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "empty"),
        ([{"role": "king", "content": ""}], r"messages\[0\]\.role"),
        ([{"content": ""}], r"messages\[0\]\.role"),
        (user(5), "neither a string"),
        (user([{"type": "image_url"}]), "not text"),
    ],
)
def test_messages_that_are_none_are_refused(model: TextModel, messages: Messages, words: str) -> None:
    with pytest.raises(CallerError, match=words):
        model.chat(messages)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
        ("{{ messages.append(1) }}", "refuses"),
        ("{{ nothing.at.all }}", "refuses"),
        ("{% if %}", "damaged"),
        (None, "no chat template"),
    ],
)
def test_templates_that_fail_are_told_in_their_own_words(tmp_path: Path, template: str | None, words: str) -> None:
    model = TextModel(byte_level(tmp_path / "m", template=template))
    with pytest.raises(CallerError, match=words):
        model.chat(user("x"))
    assert model.decode(model.encode("still here")) == "still here"


def test_a_template_may_lie_in_its_own_file_or_be_one_of_several(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m", template=None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": named}))
    model = TextModel(folder)
    assert model.decode(model.chat(user(""))) == "yes"
    (folder / "chat_template.jinja").write_text("file")
    model = TextModel(folder)
    assert model.decode(model.chat(user(""))) == "file"


def test_tokens_that_only_the_config_declares(tmp_path: Path) -> None:
    late = {"300000": {"content": "<|late|>", "special": True, "normalized": False, "lstrip": False, "rstrip": False}}
    model = TextModel(byte_level(tmp_path / "m", added_tokens_decoder=late))
    assert len(model.encode("<|late|>", special=True)) == 1
    assert len(model.encode("<|late|>")) > 1


def test_what_a_tokenizer_was_trained_with_does_not_cut_or_fill_prompts(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m")
    plain = TextModel(folder).encode("assistant user " * 40), TextModel(folder).encode("a")
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    fast.enable_truncation(16)
    fast.enable_padding(length=16)
    fast.save(str(folder / "tokenizer.json"))
    model = TextModel(folder)
    assert (model.encode("assistant user " * 40), model.encode("a")) == plain
    assert len(plain[0]) > 40


def test_special_tokens_that_only_the_older_file_names(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "m", template="{{ bos_token }}hi{{ eos_token }}", bos_token=None, eos_token=None)
    named = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(named))
    model = TextModel(folder)
    assert model.eos_ids == {2}
    ids = model.chat(user(""))
    assert (ids[0], ids[-1]) == (1, 2)


def test_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"tokenizer\.json"):
        TextModel(tmp_path)
    folder = byte_level(tmp_path / "m")
    (folder / "config.json").write_text("[1")
    with pytest.raises(ModelRefused, match=r"config\.json"):
        TextModel(folder)


def incremental(model: TextModel, ids: list[int]) -> list[str]:
    d = Detokenizer()
    return [*(d.feed([model.decode(window) for window in d.add([i])]) for i in ids), d.finish()]


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=40))
def test_text_arrives_in_whole_characters(model: TextModel, text: str) -> None:
    text = "".join(c for c in text if not "\ud800" <= c <= "\udfff")
    ids = model.encode(text)
    deltas = incremental(model, ids)
    assert "".join(deltas) == model.decode(ids) == text
    assert all("\ufffd" not in delta for delta in deltas) or "\ufffd" in text


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 400), max_size=60))
def test_any_ids_arrive_as_one_shot(model: TextModel, ids: list[int]) -> None:
    assert "".join(incremental(model, ids)) == model.decode(ids)


def test_sentence_pieces_keep_inner_spaces_and_byte_fallback_characters(tmp_path: Path) -> None:
    model = TextModel(spaced(tmp_path / "m"))
    for text in ("a b a", "a 🦀🦀 b", "é", "🦀"):
        ids = model.encode(text)
        deltas = incremental(model, ids)
        assert "".join(deltas) == text
        assert not any("\ufffd" in delta for delta in deltas)
    cut = model.encode("a🦀")[:-1]
    assert "".join(incremental(model, cut)) == model.decode(cut)


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    model = TextModel(smollm2)
    assert model.find_turn_end() == {2}
    assert model.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert incremental(model, [10813, 116, 218]) == ["", "", "🦀", ""]
    assert "".join(incremental(model, [10813, 116])) == model.decode([10813, 116]) == "\ufffd"
    assert model.chat(TALK) == reference_ids(smollm2, TALK)
