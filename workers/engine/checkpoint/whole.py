"""A checkpoint as one model in one process, for what looks at it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state

from rubato.checkpoints import StoredCheckpoint, list_checkpoints
from rubato.problems import RubatoError
from rubato.spec import JobSpec
from workers.engine.checkpoint.store import quiet
from workers.engine.models import whole_model
from workers.engine.run import RunDirectory

MODEL = "model"
"""What the weights stand under in a checkpoint."""


def chosen_checkpoint(run: RunDirectory, step: int | None) -> StoredCheckpoint:
    """The checkpoint of a step, or the newest, after all of it was read and found whole.

    Raises:
        RubatoError: there is none, or it is damaged.
    """
    there = list_checkpoints(run.checkpoints)
    steps = [each.step for each in there]
    found = next((each for each in reversed(there) if step is None or each.step == step), None)
    if found is None:
        raise RubatoError(
            f"there is no checkpoint{f' of step {step}' if step is not None else ''} in {run.checkpoints}",
            fix=f"use one of {steps}" if there else "wait for the first one",
            code="checkpoint_missing",
            status=404,
        )
    damage = found.damage()
    if damage:
        raise RubatoError(
            f"checkpoint {found.path} is damaged: {'; '.join(damage)}",
            fix=f"use another one of {steps}",
            code="checkpoint_damaged",
        )
    return found


def load_whole(stored: StoredCheckpoint, spec: JobSpec) -> nn.Module:
    """The model of a checkpoint, in fp32 on the CPU."""
    with torch.device("meta"):
        model = whole_model(spec)
    model.to_empty(device="cpu")
    model.tie_weights()
    load_weights(stored, {name: parameter.detach() for name, parameter in model.named_parameters()})
    return model.eval()


def load_weights(stored: StoredCheckpoint, weights: dict[str, Tensor]) -> None:
    """Fills whole weights, by global name, from a checkpoint of any layout."""
    with quiet():
        load_state({MODEL: weights}, storage_reader=FileSystemReader(stored.path), no_dist=True)
