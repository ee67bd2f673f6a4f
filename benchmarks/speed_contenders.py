"""Who takes part in `engine_speed`: Rubato, a bare PyTorch loop, Hugging Face Trainer and litgpt.

Each trains as its makers mean it to be done: the Trainer by its own loop, litgpt by the steps of its pretraining with
Lightning Fabric (which compiles the model), the bare loop with fused AdamW, scaled dot-product attention and DDP. All
have the batches in memory, clip gradients at norm 1 and use AdamW with the same settings.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from rubato.layout import Layout
from rubato.spec import JobSpec, parse_spec
from workers.engine.device import Device
from workers.engine.membership import StaticMembership
from workers.engine.mesh import ReplicaMesh
from workers.engine.models import whole_model
from workers.engine.parallel.compose import ModelShare
from workers.engine.run import RunDirectory
from workers.engine.watch import flops_per_token

BATCH, LENGTH, VOCABULARY = 8, 256, 2048
HIDDEN, LAYERS, HEADS, FFN = 256, 8, 8, 768
LR, BETAS, DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
STEPS = 100_000  # more than anybody takes: contenders are ended in the middle
DISTINCT = 64  # batches, which then come again


@dataclass(frozen=True)
class Turn:
    """What a contender did in its turn: seconds of all steps, loss of each (this rank's), parameters of the model."""

    seconds: float
    losses: list[float]
    parameters: int


@dataclass(frozen=True)
class Needs:
    """Packages that are missing."""

    packages: list[str]

    def sentence(self) -> str:
        """What is to be done about it."""
        return f"{', '.join(self.packages)} not installed; make bench-peers installs what can be compared with"


class Turns:
    """A contender's side of the pipe: it calls `stepped` after each step, which waits while it is others' turn."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._left = 0
        self._losses: list[float] = []
        self.parameters = 0

    def begin(self) -> None:
        """Waits for the first turn."""
        self._left = self._pipe.recv()
        self._began = time.perf_counter()

    def stepped(self, loss: float) -> None:
        """Hears of a step that is done, with its loss."""
        self._losses.append(loss)
        self._left -= 1
        if self._left == 0:
            self._pipe.send(Turn(time.perf_counter() - self._began, self._losses, self.parameters))
            self._losses = []
            self.begin()


def spec_for(ranks: int, precision: str = "fp32", *, compiled: bool = False) -> JobSpec:
    """The model and its training as Rubato's spec."""
    model = {"hidden_size": HIDDEN, "layers": LAYERS, "heads": HEADS, "kv_heads": HEADS, "ffn_size": FFN}
    return parse_spec(
        {
            "name": "speed",
            "model": model,
            "data": {"train": {"builtin": "python-stdlib"}, "sequence_length": LENGTH, "vocab_size": VOCABULARY},
            "train": {
                "steps": STEPS,
                "global_batch": BATCH * ranks,
                "precision": precision,
                "compile": compiled,
                "clip_norm": CLIP,
            },
            "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "schedule": {"name": "constant"}},
            "parallelism": {"micro_batch": BATCH},
            "workers": ranks,
            "checkpoint": {"every": STEPS},
        }
    )


def batches(ranks: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, each (DISTINCT x global batch, LENGTH): text that a small model learns quickly."""
    generator = torch.Generator().manual_seed(0)
    rows = DISTINCT * BATCH * ranks
    noise = torch.randint(0, 4, (rows, LENGTH + 1), generator=generator)
    tokens = torch.empty_like(noise)
    tokens[:, 0] = torch.randint(0, VOCABULARY, (rows,), generator=generator)
    for place in range(1, LENGTH + 1):
        tokens[:, place] = (tokens[:, place - 1] * 5 + noise[:, place]) % VOCABULARY
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class InMemory:
    """Stands where the engine has its sampler."""

    windows = validation_batches = held_out_windows = 0

    def __init__(self, ranks: int) -> None:
        self._tokens, self._targets = batches(ranks)
        self._global = BATCH * ranks

    def batch(self, step: int, samples: range) -> tuple[Tensor, Tensor]:
        """As `workers.engine.data.Sampler.batch`."""
        first = step % DISTINCT * self._global
        here = slice(first + samples.start, first + samples.stop)
        return self._tokens[here], self._targets[here]


def first_weights(ranks: int) -> dict[str, Tensor]:
    """Those that the engine begins with, by its names."""
    mesh = ReplicaMesh.of_world(Layout(1, 1, 1), 0, Device.of_rank(0, gpu=False))
    share = ModelShare(spec_for(1), mesh)
    share.initialise(share.parameters)
    return {name: parameter.detach() for name, parameter in share.parameters.items()}


@dataclass(frozen=True)
class Contender:
    """One who takes part.

    Attributes:
        run: trains until it is ended, with (turns, rank, ranks, folder).
        packages: what has to be installed for it.
        precision: of its arithmetic.
    """

    run: Callable[[Turns, int, int, Path], None]
    packages: tuple[str, ...] = ()
    precision: str = "fp32"

    @property
    def peak(self) -> str:
        """Which matrix product to compare with."""
        return "fp32" if self.precision == "fp32" else "bf16"

    @staticmethod
    def flops_per_token() -> int:
        """Of the model, forward and backward."""
        return flops_per_token(spec_for(1))


def _engine(precision: str, *, compiled: bool) -> Callable[[Turns, int, int, Path], None]:
    def run(turns: Turns, rank: int, ranks: int, folder: Path) -> None:
        from workers.engine import train as loop

        spec = spec_for(ranks, precision, compiled=compiled)
        loop.Sampler = lambda *_: InMemory(ranks)  # type: ignore[assignment, misc]
        loop.open_corpus = lambda *_: None  # type: ignore[assignment]
        layout = Layout(ranks, 1, 1)
        store = None
        if ranks > 1:
            dist.init_process_group("gloo", timeout=timedelta(minutes=30))
            store = dist.PrefixStore("data", dist.distributed_c10d._get_default_store())
        mesh = ReplicaMesh.of_world(layout, rank, Device.of_rank(0, gpu=False))
        turns.parameters = sum(parameter.numel() for parameter in whole_model(spec).parameters())

        class Reported(loop.Worker):
            def step(self, session: Any) -> bool:
                leave = super().step(session)
                turns.stepped(self.loss or 0.0)
                return leave

        loop.Worker = Reported  # type: ignore[misc]
        turns.begin()
        loop.train(
            spec,
            membership=StaticMembership(ranks, rank, store),
            mesh=mesh,
            run=RunDirectory.create(folder / f"run-{ranks}-{precision}-{compiled}"),
            warm_up_steps=0,
        )

    return run


def _bare(turns: Turns, rank: int, ranks: int, folder: Path) -> None:
    model = whole_model(spec_for(ranks))
    model.load_state_dict(first_weights(ranks))
    turns.parameters = sum(parameter.numel() for parameter in model.parameters())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    norms = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
    run = model
    if ranks > 1:
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        run = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    data = InMemory(ranks)
    turns.begin()
    for step in range(STEPS):
        tokens_BS, targets_BS = data.batch(step, range(rank * BATCH, (rank + 1) * BATCH))
        loss = functional.cross_entropy(run(tokens_BS).flatten(0, 1), targets_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        turns.stepped(loss.item())


def _trainer(turns: Turns, rank: int, ranks: int, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers import logging as quiet

    quiet.set_verbosity_error()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
        tie_word_embeddings=False,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    model.load_state_dict({_for_transformers(name): value for name, value in first_weights(ranks).items()})
    turns.parameters = model.num_parameters()
    tokens, targets = batches(ranks)
    data = [
        {"input_ids": row, "labels": target, "shift_labels": target}
        for row, target in zip(tokens, targets, strict=True)
    ]

    class InTurn(Trainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(data)

        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            self.newest = super().training_step(*arguments, **named)
            return self.newest

    from transformers import TrainerCallback

    class AfterStep(TrainerCallback):
        def on_step_end(self, *_: Any, **named: Any) -> None:
            turns.stepped(float(trainer.newest))

    arguments = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=BATCH,
        max_steps=STEPS,
        learning_rate=LR,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        weight_decay=DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        lr_scheduler_type="constant",
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        ddp_backend="gloo" if ranks > 1 else None,
        dataloader_pin_memory=False,
        remove_unused_columns=False,
        disable_tqdm=True,
    )
    trainer = InTurn(model=model, args=arguments, train_dataset=data, callbacks=[AfterStep()])
    turns.begin()
    trainer.train()


def _for_transformers(name: str) -> str:
    parts = {
        "tok_embeddings": "model.embed_tokens",
        "output": "lm_head",
        "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attention": "self_attn",
        "feed_forward": "mlp",
        "wq": "q_proj",
        "wk": "k_proj",
        "wv": "v_proj",
        "wo": "o_proj",
        "w1": "gate_proj",
        "w2": "down_proj",
        "w3": "up_proj",
        "layers": "model.layers",
        "norm": "model.norm",
    }
    return ".".join(parts.get(part, part) for part in name.split("."))


def _litgpt(turns: Turns, rank: int, ranks: int, folder: Path) -> None:
    import lightning
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import chunked_cross_entropy, instantiate_torch_optimizer

    config = Config(
        block_size=LENGTH,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        n_layer=LAYERS,
        n_head=HEADS,
        n_embd=HIDDEN,
        intermediate_size=FFN,
        rotary_percentage=1.0,
        parallel_residual=False,
        bias=False,
        norm_class_name="RMSNorm",
        norm_eps=1e-5,
        mlp_class_name="LLaMAMLP",
    )
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    strategy = lightning.fabric.strategies.DDPStrategy(process_group_backend="gloo") if ranks > 1 else "auto"
    plugins = [TorchElasticEnvironment()] if ranks > 1 else []
    fabric = lightning.Fabric(accelerator="cpu", devices=ranks, strategy=strategy, plugins=plugins)
    fabric.launch()
    model = GPT(config)
    model.load_state_dict(_for_litgpt(first_weights(ranks)), strict=False)
    turns.parameters = sum(parameter.numel() for parameter in model.parameters())
    model.max_seq_length = LENGTH
    model = fabric.setup(torch.compile(model))
    settings = {"class_path": "torch.optim.AdamW", "init_args": {"lr": LR, "betas": BETAS, "weight_decay": DECAY}}
    optimizer = fabric.setup_optimizers(instantiate_torch_optimizer(settings, model.parameters(), fused=True))
    data = InMemory(ranks)
    turns.begin()
    for step in range(STEPS):
        tokens_BS, targets_BS = data.batch(step, range(rank * BATCH, (rank + 1) * BATCH))
        loss = chunked_cross_entropy(model(tokens_BS), targets_BS)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=CLIP)
        optimizer.step()
        optimizer.zero_grad()
        turns.stepped(loss.item())


def _for_litgpt(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = {
        "tok_embeddings": "transformer.wte",
        "output": "lm_head",
        "attention_norm": "norm_1",
        "ffn_norm": "norm_2",
        "attention": "attn",
        "feed_forward": "mlp",
        "wo": "proj",
        "w1": "fc_1",
        "w2": "proj",
        "w3": "fc_2",
        "layers": "transformer.h",
        "norm": "transformer.ln_f",
    }
    named = {
        ".".join(parts.get(part, part) for part in name.split(".")): value
        for name, value in weights.items()
        if not name.endswith(("wq.weight", "wk.weight", "wv.weight"))
    }
    for layer in range(LAYERS):
        attention = f"layers.{layer}.attention."
        named[f"transformer.h.{layer}.attn.qkv.weight"] = torch.cat(
            [weights[f"{attention}{name}.weight"] for name in ("wq", "wk", "wv")]
        )
    return named


CONTENDERS: dict[str, Contender] = {
    "bare": Contender(_bare),
    "trainer": Contender(_trainer, ("transformers", "accelerate")),
    "litgpt": Contender(_litgpt, ("lightning", "litgpt")),
    "rubato": Contender(_engine("fp32", compiled=True)),
    "rubato_eager": Contender(_engine("fp32", compiled=False)),
    "rubato_fastest": Contender(_engine("bf16_pure", compiled=True), precision="bf16_pure"),
}


def take_part(name: str, rank: int, ranks: int, port: int, folder: str, pipe: Connection) -> None:
    """What a contender's process does. Ended from outside."""
    os.dup2(2, 1)  # what libraries print is no figure
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    if ranks > 1:
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
            GROUP_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
            TORCHELASTIC_RUN_ID="speed",
        )  # fmt: skip
    torch.set_num_threads(1)
    CONTENDERS[name].run(Turns(pipe), rank, ranks, Path(folder))
