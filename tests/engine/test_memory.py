"""Recomputation changes memory and arithmetic, never numbers; a vocabulary need not divide by the tensor degree."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from rubato.layout import Layout
from rubato.spec import RecomputeSpec
from tests.engine.forked import in_one_process, run_ranks
from tests.engine.jobs import tiny_spec, train_at, write_corpus
from workers.engine.memory.recompute import apply_recompute
from workers.engine.models.llama import Llama, LlamaConfig
from workers.engine.parallel.tensor import NOT_COUNTED, TokenLoss, vocab_share

CONFIG = LlamaConfig(
    hidden_size=64, layers=4, heads=4, kv_heads=4, head_size=16, ffn_size=192, vocab_size=64, sequence_length=128,
    rope_theta=1e4, rope_scaling=None, norm_eps=1e-5, tie_embeddings=False,
)  # fmt: skip


class Cost(NamedTuple):
    """What a forward and backward pass came to; activations in bytes."""

    loss: float
    gradients: list[torch.Tensor]
    activations: int
    flops: int


def cost(recompute: dict[str, Any]) -> Cost:
    torch.manual_seed(0)
    model = Llama(CONFIG)
    apply_recompute(model.layers, RecomputeSpec.model_validate(recompute))
    tokens_BS = torch.randint(CONFIG.vocab_size, (2, CONFIG.sequence_length))

    def step() -> torch.Tensor:
        loss = functional.cross_entropy(model(tokens_BS).flatten(0, 1), tokens_BS.flatten())
        loss.backward()
        return loss.detach()

    with FlopCounterMode(display=False) as counter:
        loss = step()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        functional.cross_entropy(model(tokens_BS).flatten(0, 1), tokens_BS.flatten())
        # At the end of the forward pass, when most is kept.
        kept = next(iter(tracker.get_tracker_snapshot("current").values()))
    activations = next(size for kind, size in kept.items() if "ACT" in str(kind))
    return Cost(float(loss), gradients, activations, counter.get_total_flops())


@pytest.fixture(scope="module")
def costs() -> dict[str, Cost]:
    modes: dict[str, dict[str, Any]] = {
        "none": {},
        "selective": {"mode": "selective"},
        "every 2": {"every": 2},
        "full": {"mode": "full"},
    }
    return in_one_process(lambda: {name: cost(mode) for name, mode in modes.items()})


@pytest.mark.parametrize("mode", ["selective", "every 2", "full"])
def test_recomputation_changes_no_number(mode: str, costs: dict[str, Cost]) -> None:
    assert costs[mode].loss == costs["none"].loss
    assert all(map(torch.equal, costs[mode].gradients, costs["none"].gradients))


def test_recomputation_pays_memory_with_arithmetic(costs: dict[str, Cost]) -> None:
    share = {name: each.activations / costs["none"].activations for name, each in costs.items()}
    assert share["full"] < 0.1
    assert share["every 2"] == pytest.approx((1 + share["full"]) / 2, abs=0.03)
    assert 0.5 < share["selective"] < 0.7

    tokens = 2 * CONFIG.sequence_length
    hidden, ffn = CONFIG.hidden_size, CONFIG.ffn_size
    products = 2 * tokens * (4 * hidden**2 + 3 * hidden * ffn)
    extra = {name: each.flops - costs["none"].flops for name, each in costs.items()}
    # The last product of a layer need not be computed again: nothing in the layer's backward pass asks for it. (The
    # counter knows no FLOPs of attention on CPU.)
    layer = products - 2 * tokens * hidden * ffn
    assert extra["selective"] == 0
    assert extra["every 2"] == CONFIG.layers // 2 * layer
    assert extra["full"] == CONFIG.layers * layer


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def curve(
    layout: Layout, sections: dict[str, Any], corpus: Path, folder: Path, rank: int = 0, store: Any = None
) -> list[list[float]]:
    """Loss, gradient norm and validation loss of each step that was trained."""
    shape = {"tensor": layout.tensor, "pipeline": layout.pipeline, **sections.get("parallelism", {})}
    spec = tiny_spec(
        corpus,
        **{
            **sections,
            "data": {"validation": {"every": 1}, **sections.get("data", {})},
            "parallelism": shape,
            "workers": layout.world_size,
        },
    )
    metrics = train_at(layout, spec, folder, rank, store, f"{layout}-{sections}")
    return [[metric[what] for what in ("loss", "grad_norm", "validation_loss")] for metric in metrics]


def same(found: list[list[float]], expected: list[list[float]]) -> bool:
    return torch.allclose(torch.tensor(found).double(), torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_the_logits_of_a_chunk_are_all_there_is_of_them() -> None:
    """Same loss and gradients, and no tensor of the width of the vocabulary has more rows than a chunk."""
    chunks, batch, vocab = 4, 2, 1000

    def work() -> tuple[list[float], list[float], set[int], set[int]]:
        torch.set_default_dtype(torch.float64)
        torch.manual_seed(0)
        head = torch.nn.Linear(8, vocab)
        hidden_BSD = torch.randn(batch, 16, 8)
        targets_BS = torch.randint(vocab, (batch, 16))
        targets_BS[0, :3] = NOT_COUNTED
        found = []
        for loss_of, made_of in (
            (TokenLoss(32, vocab, None), head),
            (TokenLoss(32, vocab, None, head, chunks), torch.nn.Identity()),
        ):
            hidden = hidden_BSD.clone().requires_grad_()
            with Rows(vocab) as rows:
                loss = loss_of(made_of(hidden), targets_BS)
                loss.backward()
            gradients = torch.cat([hidden.grad.flatten(), head.weight.grad.flatten()])
            head.weight.grad = None
            found.append((float(loss), gradients, rows.seen))
        (whole, expected, all_rows), (chunked, gradients, chunk_rows) = found
        return [whole, float(expected.norm())], [chunked, float((gradients - expected).norm())], all_rows, chunk_rows

    (whole, norm), (chunked, difference), all_rows, chunk_rows = in_one_process(work)
    assert chunked == pytest.approx(whole, rel=1e-12)
    assert difference < 1e-12 * norm
    assert max(all_rows) == batch * 16
    assert max(chunk_rows) == batch * 16 // chunks


class Rows(TorchDispatchMode):
    """The numbers of rows of all matrices of one width that are made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self._width = width
        self.seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.ndim > 1 and made.shape[-1] == self._width:
            self.seen.add(made.numel() // self._width)
        return made


def test_recomputation_with_tensor_and_pipeline_parallelism(corpus: Path, tmp_path: Path) -> None:
    reference = in_one_process(lambda: curve(Layout(1, 1, 1), {}, corpus, tmp_path / "one"))
    cases: list[tuple[Layout, dict[str, Any]]] = [
        (Layout(1, 1, 2), {"memory": {"recompute": {"every": 2}}}),
        (Layout(1, 1, 2), {"memory": {"recompute": "selective", "loss_chunks": 4}}),
        (Layout(1, 2, 1), {"memory": {"recompute": "selective", "loss_chunks": 2}}),
        (Layout(1, 2, 1), {"memory": {"recompute": "full"}, "parallelism": {"schedule": "dualpipev"}}),
    ]
    by_rank = run_ranks(
        2,
        lambda rank, store: [
            curve(*case, corpus, tmp_path / str(index), rank, store) for index, case in enumerate(cases)
        ],
    )
    assert len(reference) == 3
    for case, found in zip(cases, by_rank[0], strict=True):
        assert same(found, reference), case


def test_a_vocabulary_that_does_not_divide_is_split_and_resharded(corpus: Path, tmp_path: Path) -> None:
    """256 tokens over 3 ranks are 86, 86 and 84; what they save, one process loads, and the curve goes on."""
    assert [vocab_share(256, 3, index) for index in range(3)] == [86, 86, 84]
    assert [vocab_share(5, 4, index) for index in range(4)] == [2, 2, 1, 0]
    sections: dict[str, Any] = {
        "model": {"hidden_size": 12, "heads": 3, "kv_heads": 3},
        "data": {"sequence_length": 18},
        "optimizer": {"schedule": {"name": "constant"}},
    }
    half = {**sections, "train": {"steps": 2}}
    whole = {**sections, "train": {"steps": 4}}
    reference = in_one_process(lambda: curve(Layout(1, 1, 1), whole, corpus, tmp_path / "one"))
    split = run_ranks(6, lambda rank, store: curve(Layout(1, 2, 3), half, corpus, tmp_path / "split", rank, store))[0]
    rest = in_one_process(lambda: curve(Layout(1, 1, 1), whole, corpus, tmp_path / "split"))
    assert (len(split), len(rest)) == (2, 2)
    assert same(split + rest, reference)
