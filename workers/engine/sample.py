"""Text from a checkpoint: ``python -m workers.engine.sample RUN_DIR --prompt TEXT``, in one process on the CPU.

The text goes to stdout as it is made. Exit status: 0 done, 2 refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from rubato.corpus.chat import render
from rubato.problems import FieldProblem, RubatoError
from rubato.tokenizers import Tokenizer, open_tokenizer
from workers.engine.checkpoint.whole import chosen_checkpoint, load_whole
from workers.engine.run import RunDirectory


@torch.no_grad()
def continued(
    model: nn.Module, ids: list[int], most: int, length: int, temperature: float, top: int, seed: int
) -> Iterator[int]:
    """The tokens that follow, one by one.

    Args:
        most: tokens to make.
        length: positions that the model looks back over.
        temperature: 0: always the likeliest token.
        top: only so many of the likeliest are drawn from; 0: all.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(most):
        window = ids[-length:]
        # The model's positions are of a fixed number: what stands behind the last token does not matter to it.
        tokens_1S = torch.tensor([window + [0] * (length - len(window))])
        logits_V = model(tokens_1S)[0, len(window) - 1].float()
        if temperature == 0:
            found = int(logits_V.argmax())
        else:
            if top:
                logits_V[logits_V < logits_V.topk(min(top, len(logits_V))).values[-1]] = -torch.inf
            found = int(torch.multinomial((logits_V / temperature).softmax(0), 1, generator=generator))
        ids = [*ids, found]
        yield found


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workers.engine.sample", description="Text from a checkpoint.")
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path, help="the directory of a run")
    parser.add_argument("--prompt", required=True, help="what the text begins with")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument("--tokens", type=int, default=100, help="tokens to make, at most (default: 100)")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: always the likeliest token (default: 0.8)")
    parser.add_argument("--top", type=int, default=0, help="draw from so many of the likeliest tokens (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="another one, another text (default: 0)")
    parser.add_argument("--chat", action="store_true", help="the prompt is what a user says, answered by an assistant")
    options = parser.parse_args(arguments)
    try:
        run = RunDirectory(options.run_dir)
        spec, stored = run.read_spec(), chosen_checkpoint(run, options.step)
        tokenizer = open_tokenizer(spec.data.tokenizer, spec.data.end_of_document, spec.data.vocab_size)
        ids = prompt_ids(tokenizer, options.prompt, chat=options.chat)
        model = load_whole(stored, spec)
    except RubatoError as error:
        sys.stderr.write(f"error: {error.detail}\n  fix: {error.fix}\n")
        return 2
    length = spec.data.sequence_length
    made: list[int] = []
    told = ""
    for token in continued(model, ids, options.tokens, length, options.temperature, options.top, options.seed):
        if token == tokenizer.end:
            break
        made.append(token)
        text = tokenizer.decode(made)
        if not text.endswith("\ufffd"):  # a character whose bytes are not all there yet
            sys.stdout.write(text[len(told) :])
            sys.stdout.flush()
            told = text
    sys.stdout.write("\n")
    return 0


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, chat: bool) -> list[int]:
    """The tokens of a prompt. Raises RubatoError when there are none."""
    text = render([{"role": "user", "content": prompt}], tokenizer.template, ask=True) if chat else prompt
    ids = tokenizer.encode([text.encode()])[0].tolist()
    if not ids:
        problem = FieldProblem("prompt", "is empty", "give some text to begin with")
        raise RubatoError(str(problem), fix=problem.fix, code="prompt_empty", status=422, problems=[problem])
    return ids


if __name__ == "__main__":
    sys.exit(main())
