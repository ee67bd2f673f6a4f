"""export and sample: a checkpoint as a Hugging Face folder, or asked for text, by the engine on this machine."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from rubato.cli.options import JobName, Json, Url
from rubato.cli.output import DONE, JOB_FAILED, REFUSED, console, note
from rubato.client import Client
from rubato.problems import RubatoError


def export(
    job: JobName,
    into: Annotated[Path, typer.Option("--into", "-o", help="Folder to write, a new one.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; by default the newest.")] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Of the weights; by default as the model began, else float32."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> int:
    """Write a checkpoint as a folder that transformers loads. The run directory must be reachable from here."""
    run = _run_directory(job, url, "export")
    # A process of its own: the command line loads no torch.
    command = [*_engine("export"), str(run), "--into", str(into.absolute())]
    command += ["--step", str(step)] if step is not None else []
    command += ["--dtype", dtype] if dtype is not None else []
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if ended.returncode:
        return REFUSED if ended.returncode == REFUSED else JOB_FAILED
    line = ended.stdout.decode().strip().splitlines()[-1]
    if json:
        console().print(line, soft_wrap=True)
    else:
        note(line)
        console().print(str(into.absolute()), soft_wrap=True)
    return DONE


def sample(
    job: JobName,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What the text begins with.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="Of the checkpoint; by default the newest.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to make, at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.8,
    seed: Annotated[int, typer.Option(min=0, help="Another one, another text.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="The prompt is what a user says to the assistant.")] = False,
    url: Url = None,
) -> int:
    """Let a checkpoint go on with a text. The run directory must be reachable from here."""
    run = _run_directory(job, url, "sample")
    command = [*_engine("sample"), str(run), "--prompt", prompt, "--tokens", str(tokens)]
    command += ["--temperature", str(temperature), "--seed", str(seed)]
    command += ["--step", str(step)] if step is not None else []
    command += ["--chat"] if chat else []
    ended = subprocess.run(command, check=False)
    return ended.returncode if ended.returncode in (DONE, REFUSED) else JOB_FAILED


def _run_directory(job: str, url: str | None, command: str) -> Path:
    with Client(url) as client:
        run = Path(client.job(job).run_dir)
    if not run.is_dir():
        raise RubatoError(
            f"the run directory {run} cannot be seen from this machine",
            fix=f"run `python -m workers.engine.{command} {run}` on a machine that shares it",
            code="run_directory_unseen",
        )
    if find_spec("torch") is None:
        raise RubatoError("torch is not installed here, which reads checkpoints", fix="install it", code="no_torch")
    return run


def _engine(command: str) -> list[str]:
    return [sys.executable, "-m", f"workers.engine.{command}"]
