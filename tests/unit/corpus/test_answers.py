"""Fine-tuning counts what the assistant says and nothing else, however the corpus is cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rubato.corpus.chat import ChatError, parts, render
from rubato.corpus.open import open_corpus
from rubato.corpus.train_tokenizer import train_tokenizer
from rubato.problems import RubatoError
from rubato.spec import CorpusSpec
from rubato.tokenizers import open_tokenizer
from workers.engine.data import Sampler
from workers.engine.data.windows import NOT_COUNTED

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}"
    "{{ raise_exception('only users and assistants') }}{% endif %}"
    "[{{ m['role'] }}] {{ m['content'] | trim }};{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def chat(number: int) -> list[dict[str, str]]:
    return [
        {"role": "user", "content": f"what is {number}?"},
        {"role": "assistant", "content": f"it is {number}."},
        {"role": "user", "content": "and its square?" * (1 + number % 3)},
        {"role": "assistant", "content": f"{number * number}!"},
        {"role": "user", "content": "thanks"},
    ]


def answers(number: int) -> list[str]:
    return [f"it is {number}.<|im_end|>\n", f"{number * number}!<|im_end|>\n"]


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": chat(number)}) + "\n" for number in range(60)))
    return path


def test_a_chat_is_cut_where_the_assistant_speaks() -> None:
    found = parts(chat(7), None)
    assert [text for text, answer in found if answer] == answers(7)
    assert "".join(text for text, _ in found) == render(chat(7)[:4], None)
    assert [answer for _, answer in found] == [False, True, False, True]
    assert found[0][0].endswith("<|im_start|>assistant\n")
    assert [text for text, answer in parts(chat(7), TEMPLATE) if answer] == [" it is 7.;", " 49!;"]


def test_a_template_that_refuses_or_hides_answers_is_told() -> None:
    with pytest.raises(ChatError, match="only users and assistants"):
        parts([{"role": "system", "content": "be kind"}, *chat(1)], TEMPLATE)
    with pytest.raises(ChatError, match="does not write an answer where it asks for one"):
        parts(chat(1), "{% for m in messages | reverse %}{{ m['content'] }}{% endfor %}")
    with pytest.raises(ChatError, match="template is broken"):
        parts(chat(1), "{% for %}")
    with pytest.raises(ChatError, match="refuses it"):  # templates come with models: they reach nothing
        parts(chat(1), "{{ messages.__class__.__base__.__subclasses__() }}")


@pytest.mark.parametrize(
    ("shuffle", "packing"), [("windows", "stream"), ("documents", "stream"), ("windows", "padded")]
)
@pytest.mark.parametrize("tokenizer", ["bytes", "learned"])
def test_an_epoch_counts_every_answer_once_and_nothing_else(
    tokenizer: str, shuffle: str, packing: str, chats: Path, tmp_path: Path, make_spec
) -> None:
    if tokenizer == "learned":
        train_tokenizer(CorpusSpec(path=str(chats), field="messages"), 300, tmp_path / "learned")
        tokenizer = str(tmp_path / "learned")
    data: dict[str, Any] = {
        "train": {"path": str(chats), "field": "messages"},
        "validation": {"fraction": 0.0},
        "tokenizer": tokenizer,
        "answers_only": True,
        "shuffle": shuffle,
        "packing": packing,
        "sequence_length": 16,
    }
    spec = make_spec(data=data, train={"global_batch": 1})
    corpus = open_corpus(spec, tmp_path / "cache")
    sampler = Sampler(spec, corpus)
    found = []
    for step in range(sampler.windows[0]):
        tokens, targets = (each[0].numpy() for each in sampler.batch(step, range(1)))
        kept = targets != NOT_COUNTED
        assert np.array_equal(targets[:-1][kept[:-1]], tokens[1:][kept[:-1]])
        found += targets[kept].tolist()
    ids = open_tokenizer(tokenizer)
    said = [ids.encode([text.encode()])[0].tolist() for number in range(60) for text in answers(number)]
    expected = sorted(token for answer in said for token in answer)
    lost = len(expected) - len(found)  # those in the window that the end of a stream does not fill
    assert 0 <= lost <= (0 if packing == "padded" else 16)
    left = list(expected)
    for token in found:
        left.remove(token)
    assert len(left) == lost


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("a.jsonl", '{"messages": "only text"}\n', "of which nothing is an answer"),
        ("a.jsonl", '{"messages": [{"role": "user", "content": "hello?"}]}\n', "no message of the assistant"),
        ("a.txt", "text", "in which no answers can be told apart"),
    ],
)
def test_what_holds_no_answers_is_refused(name: str, content: str, cause: str, tmp_path: Path, make_spec) -> None:
    (tmp_path / name).write_text(content)
    data = {"train": {"path": str(tmp_path / name), "field": "messages"}, "answers_only": True}
    with pytest.raises(RubatoError, match=cause):
        open_corpus(make_spec(data=data), tmp_path / "cache")
