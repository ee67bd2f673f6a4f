"""Text out of the model as it is being trained: spread over stages and tensor ranks, one token after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from rubato.spec import JobSpec
from workers.engine.mesh import ReplicaMesh
from workers.engine.parallel.compose import ModelShare
from workers.engine.parallel.pipeline import Runner
from workers.engine.parallel.tensor import NOT_COUNTED, vocab_share


class Generator:
    """Continues prompts with the runner of a replica, whose shape is fixed.

    Each token takes a forward pass over whole sequences: attention is causal, so what stands behind the last token
    does not matter. That costs what an evaluation does, and needs neither a cache nor a second form of the model.

    All workers of the replica call together.
    """

    def __init__(self, spec: JobSpec, mesh: ReplicaMesh, share: ModelShare) -> None:
        self._length = spec.data.sequence_length
        self._vocab = spec.data.vocab_size
        self._mesh = mesh
        self._loss = share.loss

    def continue_all(
        self,
        runner: Runner,
        rows: int,
        prompts: Sequence[Sequence[int]],
        tokens: int,
        *,
        vocabulary: int,
        temperature: float,
        seed: int,
    ) -> list[list[int]]:
        """What follows each prompt, ``tokens`` tokens long.

        Args:
            runner: of this generation.
            rows: sequences that it runs.
            prompts: tokens, at least one of each; of long ones the end that leaves room.
            tokens: to make, fewer than a sequence has.
            vocabulary: tokens that mean something; the model may have more, which are never made.
            temperature: what logits are divided by; 0: the likeliest token is taken.
            seed: of the draws, the same on all workers.
        """
        found: list[list[int]] = []
        for begin in range(0, len(prompts), rows):
            some = [list(prompt)[-(self._length - tokens) :] for prompt in prompts[begin : begin + rows]]
            draw = torch.Generator().manual_seed(seed + begin)
            choose = partial(_choose, vocabulary=vocabulary, temperature=temperature, draw=draw)
            found += self._continue(runner, rows, some, tokens, choose)
        return found

    def _continue(
        self, runner: Runner, rows: int, prompts: list[list[int]], tokens: int, choose: Callable[[Tensor], Tensor]
    ) -> list[list[int]]:
        device = self._mesh.device.torch_device
        sequences = [list(prompt) for prompt in prompts]
        targets_BS = torch.full((rows, self._length), NOT_COUNTED, device=device)
        for _ in range(tokens):
            tokens_BS = torch.zeros(rows, self._length, dtype=torch.int64)
            for row, sequence in enumerate(sequences):
                tokens_BS[row, : len(sequence)] = torch.tensor(sequence)
            last_B = torch.tensor([len(sequence) - 1 for sequence in sequences])
            logits_BV = self._logits(runner, tokens_BS.to(device), targets_BS, last_B)
            chosen = [0.0] * len(sequences)
            if logits_BV is not None and self._mesh.tensor.index == 0:
                chosen = choose(logits_BV).double().tolist()
            # One worker of the replica has chosen, the others add nothing.
            for sequence, token in zip(sequences, self._mesh.sum(chosen), strict=True):
                sequence.append(int(token))
        return [sequence[len(prompt) :] for sequence, prompt in zip(sequences, prompts, strict=True)]

    def _logits(self, runner: Runner, tokens_BS: Tensor, targets_BS: Tensor, last_B: Tensor) -> Tensor | None:
        """Logits of the next token of each row that has a place in ``last_B``, fp32 on the CPU; None: another stage
        has them."""
        heard: list[Tensor] = []
        # Of all that a micro-batch computes only these positions are kept.
        places = list(last_B)

        def keep(logits_BSV: Tensor) -> None:
            here, places[:] = places[: len(logits_BSV)], places[len(logits_BSV) :]
            if here:
                heard.append(logits_BSV[range(len(here)), here].detach().float())

        with self._loss.heard_by(keep):
            runner.evaluate(tokens_BS, targets_BS)
        if not heard:
            return None
        return self._whole(torch.cat(heard)).cpu()

    def _whole(self, logits_BV: Tensor) -> Tensor:
        axis = self._mesh.tensor
        if axis.group is None:
            return logits_BV
        shares = [vocab_share(self._vocab, axis.size, index) for index in range(axis.size)]
        widest = logits_BV.new_full((len(logits_BV), shares[0]), -torch.inf)
        widest[:, : logits_BV.shape[1]] = logits_BV
        parts = [torch.empty_like(widest) for _ in shares]
        dist.all_gather(parts, widest, group=axis.group)
        return torch.cat([part[:, :share] for part, share in zip(parts, shares, strict=True)], dim=1)


def _choose(logits_BV: Tensor, vocabulary: int, temperature: float, draw: torch.Generator) -> Tensor:
    logits_BV = logits_BV[:, :vocabulary]
    if temperature == 0:
        return logits_BV.argmax(dim=-1)
    return torch.multinomial(torch.softmax(logits_BV / temperature, dim=-1), 1, generator=draw)[:, 0]
