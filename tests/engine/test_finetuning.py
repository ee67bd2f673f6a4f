"""Fine-tuning a model of transformers on chats takes the steps that transformers and torch would take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rubato.layout import Layout
from rubato.spec import JobSpec
from tests.engine import families
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import TINY, tiny_spec, train_at
from workers.engine.data import Sampler, open_corpus

STEPS, LR, CLIP = 20, 3e-3, 0.5
SPLIT = Layout(1, 2, 2)


def write_chats(path: Path) -> Path:
    lines = []
    for number in range(80):
        question = {"role": "user", "content": f"{number} and {number}?"}
        lines.append(json.dumps({"messages": [question, {"role": "assistant", "content": f"makes {2 * number}"}]}))
    path.write_text("\n".join(lines))
    return path


def spec_of(folder: Path, chats: Path, layout: Layout) -> JobSpec:
    return tiny_spec(
        chats,
        model={**dict.fromkeys(TINY), "from": str(folder)},
        data={
            "train": {"path": str(chats), "field": "messages"},
            "tokenizer": "bytes",
            "answers_only": True,
            "packing": "padded",
            "sequence_length": 32,
        },
        train={"steps": STEPS, "clip_norm": CLIP},
        optimizer={
            "lr": LR,
            "weight_decay": 0.1,
            "no_decay": ["norms", "biases"],
            "schedule": {"name": "constant", "warmup": 0},
        },
        parallelism={"tensor": layout.tensor, "pipeline": layout.pipeline},
        workers=layout.world_size,
    )


def by_torch(folder: Path, spec: JobSpec, cache: Path) -> list[float]:
    """The plain way: one model, torch's AdamW, torch's clipping."""
    model, sampler = families.loaded(folder), Sampler(spec, open_corpus(spec, cache))
    named = list(model.parameters())
    groups = [
        {"params": [each for each in named if each.ndim > 1], "weight_decay": 0.1},
        {"params": [each for each in named if each.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=spec.optimizer.betas, eps=spec.optimizer.eps)
    losses = []
    for step in range(STEPS):
        tokens_BS, targets_BS = sampler.batch(step, range(spec.train.global_batch))
        # No mask for what pads a window: it stands behind all that counts, and attention looks back only.
        loss = torch.nn.functional.cross_entropy(model(tokens_BS).logits.flatten(0, 1), targets_BS.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss))
    return losses


@pytest.mark.long
@pytest.mark.parametrize("kind", ["llama3", "gpt2"])
def test_twenty_steps_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    chats, folder = write_chats(tmp_path / "chats.jsonl"), tmp_path / "model"
    in_one_process(lambda: families.save(kind, folder))
    spec = spec_of(folder, chats, SPLIT)

    def ours(rank: int, store: Any) -> list[float]:
        metrics = train_at(SPLIT, spec, tmp_path / "run", rank, store, dtype=torch.float32)
        return [each["loss"] for each in metrics]

    expected = in_one_process(lambda: by_torch(folder, spec, tmp_path / "cache"))
    found = run_ranks(4, ours, seconds=240)[0]
    assert len(found) == STEPS
    assert found == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 0.2  # it has learned something
