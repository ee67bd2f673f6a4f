"""What is listed is complete, what is loaded was verified, and no failure, kill or rival leaves half a checkpoint."""

from __future__ import annotations

import json
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from rubato.checkpoints import list_checkpoints
from rubato.layout import Layout
from rubato.problems import RubatoError, SpecError
from rubato.spec import JobSpec, load_spec, parse_spec
from rubato.spec.identity import curve_hash
from workers.engine.checkpoint import CheckpointStore, FencedError

ONE = Layout(1, 1, 1)
SPEC = parse_spec(
    {
        "name": "small",
        "model": {"preset": "tiny"},
        "data": {"train": {"builtin": "python-stdlib"}},
        "train": {"steps": 10, "global_batch": 4},
        "workers": {"min": 1, "max": 8},
    }
)


def state_of(step: int) -> dict[str, Any]:
    return {
        "model": {"layers.0.weight": torch.full((8, 6), float(step))},
        "optimizer": {"state.layers.0.weight.exp_avg": torch.full((8, 6), step / 10), "param_groups.0.lr": 0.5 * step},
        "step": step,
    }


def save(store: CheckpointStore, *steps: int, loss: float | None = 1.5) -> None:
    for step in steps:
        store.save(step, state_of(step), layout=ONE, spec=SPEC, loss=loss)


def steps_in(folder: Path) -> list[int]:
    return [stored.step for stored in list_checkpoints(folder)]


def data_file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}" / "__0_0.distcp"


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def assert_loads(store: CheckpointStore, step: int) -> None:
    state = state_of(0)
    store.load(step, state)
    expected = state_of(step)
    assert state["step"] == step
    assert state["optimizer"]["param_groups.0.lr"] == expected["optimizer"]["param_groups.0.lr"]
    for part, name in (("model", "layers.0.weight"), ("optimizer", "state.layers.0.weight.exp_avg")):
        assert torch.equal(state[part][name], expected[part][name])


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "new", keep_last=3)
    assert store.newest() is None
    assert store.checkpoints() == []
    save(store, 10, 20)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 20
    assert_loads(store, 20)
    assert_loads(store, 10)


def test_the_manifest_tells_what_the_checkpoint_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    stored = store.save(7, state_of(7), layout=Layout(2, 2, 1), spec=SPEC, loss=2.25)
    content = json.loads((tmp_path / "step-00000007" / "manifest.json").read_text())
    assert content["step"] == 7
    assert content["loss"] == 2.25
    assert content["layout"] | {"zero": 0} == {
        "data": 2, "pipeline": 2, "tensor": 1, "zero": 0, "micro_batch": 1, "accumulation": 2
    }  # fmt: skip
    assert content["spec_hash"] == curve_hash(SPEC)
    others = {path.name: path.stat().st_size for path in stored.path.iterdir() if path.name != "manifest.json"}
    assert {name: file["bytes"] for name, file in content["files"].items()} == others
    assert stored.bytes == sum(others.values())
    view = list_checkpoints(tmp_path)[0].view()
    assert (view.step, view.loss, view.verified, view.bytes) == (7, 2.25, True, stored.bytes)


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, keep_last=2), 1, 2, 3, 10)
    assert steps_in(tmp_path) == [3, 10]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000003", "step-00000010"]


@pytest.mark.parametrize("harm", ["flip", "truncate", "remove", "manifest", "metadata"])
def test_a_damaged_checkpoint_is_passed_over_and_reported(tmp_path: Path, harm: str) -> None:
    reported: list[tuple[str, str, dict[str, Any]]] = []
    store = CheckpointStore(tmp_path, keep_last=3, report=lambda *report: reported.append(report))
    save(store, 10, 20)
    file = data_file(tmp_path, 20)
    match harm:
        case "flip":
            flip_a_bit(file)
        case "truncate":
            file.write_bytes(file.read_bytes()[:-1])
        case "remove":
            file.unlink()
        case "manifest":
            (file.parent / "manifest.json").write_text("{")
        case "metadata":
            flip_a_bit(file.parent / ".metadata")
    newest = store.newest()
    assert newest is not None
    assert newest.step == 10
    assert [(kind, data["path"]) for kind, _, data in reported] == [("checkpoint.corrupt", str(file.parent))]
    assert reported[0][2]["damage"]
    if harm not in ("flip", "metadata"):  # what sizes tell, a listing tells
        assert steps_in(tmp_path) == [10]


def test_a_damaged_checkpoint_is_written_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 10, 20)
    flip_a_bit(data_file(tmp_path, 20))
    store = CheckpointStore(tmp_path, keep_last=3)  # one that has not seen it whole
    save(store, 20)
    newest = store.newest()
    assert newest is not None
    assert newest.step == 20
    assert_loads(store, 20)


def test_a_whole_checkpoint_of_the_same_step_is_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 10, loss=1.0)
    save(store, 10, loss=9.0)
    assert [stored.manifest.loss for stored in store.checkpoints()] == [1.0]


def test_a_checkpoint_that_lost_a_file_since_it_was_saved_is_written_anew(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 20)
    data_file(tmp_path, 20).unlink()
    save(store, 20)
    assert_loads(store, 20)


def test_retention_never_removes_the_newest_verified_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 90)
    save(CheckpointStore(tmp_path, keep_last=9), 100, 110, 120)
    for step in (100, 110):
        flip_a_bit(data_file(tmp_path, step))
    data_file(tmp_path, 120).unlink()
    save(store, 95)  # a run that fell back to 90 has come this far
    assert steps_in(tmp_path) == [95]
    assert_loads(store, 95)


def test_a_verified_checkpoint_ahead_is_kept_by_a_run_that_starts_over(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 100)
    save(store, 10, 20)
    assert steps_in(tmp_path) == [20, 100]


def test_who_lost_the_run_publishes_nothing(tmp_path: Path) -> None:
    save(CheckpointStore(tmp_path, keep_last=1), 10)
    answers = iter([True, False])  # the run is lost while the save is under way
    with pytest.raises(FencedError):
        save(CheckpointStore(tmp_path, keep_last=1, fence=lambda: next(answers)), 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]


def test_who_lost_the_run_sweeps_nothing(tmp_path: Path) -> None:
    rival = tmp_path / ".step-00000030-0badcafe.tmp"
    rival.mkdir()
    with pytest.raises(FencedError):
        save(CheckpointStore(tmp_path, keep_last=1, fence=lambda: False), 20)
    assert list(tmp_path.iterdir()) == [rival]


KILLED = """
import sys
from pathlib import Path
from test_checkpoint_store import CheckpointStore, save
asked = iter([True])
def fence():
    for answer in asked:
        return answer
    print("all is written, nothing has its name yet", flush=True)
    sys.stdin.read()  # for ever: the other end stays open
save(CheckpointStore(Path(sys.argv[1]), keep_last=3, fence=fence), 20)
"""


def test_a_killed_save_leaves_what_was_there_and_is_swept_by_the_next(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=3)
    save(store, 10)
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
    assert process.returncode == -signal.SIGKILL
    left = [path for path in tmp_path.iterdir() if path.suffix == ".tmp"]
    assert len(left) == 1
    assert (left[0] / "manifest.json").exists()
    assert steps_in(tmp_path) == [10]
    newest = store.newest()
    assert newest is not None
    assert newest.step == 10
    save(store, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_a_folder_that_cannot_be_written_is_named_with_the_cause(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RubatoError, match=r"step-00000001 could not be saved: .*File exists") as caught:
        save(CheckpointStore(tmp_path / "file", keep_last=1), 1)
    assert caught.value.code == "checkpoint_unsaved"


def test_a_state_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    state = {"model": {"weight": torch.zeros(2)}, "hook": (value for value in ())}  # a generator cannot be pickled
    with pytest.raises(RubatoError, match=r"rank 0: .*generator"):
        CheckpointStore(tmp_path, keep_last=1).save(1, state, layout=ONE, spec=SPEC, loss=None)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file grows beyond, as on a full disk
    try:
        with pytest.raises(RubatoError, match="step-00000002 could not be saved"):
            store.save(2, {"model": {"weight": torch.zeros(50_000)}}, layout=ONE, spec=SPEC, loss=None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    with pytest.raises(RubatoError, match=r"Missing key.*model\.other"):
        store.load(1, {"model": {"other": torch.zeros(2)}})
    with pytest.raises(RubatoError, match="Size mismatch"):
        store.load(1, {"model": {"layers.0.weight": torch.zeros(2)}})
    with pytest.raises(RubatoError, match=r"no checkpoint of step 2 .*use one of \[1\]"):
        store.load(2, state_of(0))


# Over ranks: two pipeline stages, each with two tensor partners, loaded by one process and by two.

SIZE = (8, 6)


def whole(layer: int) -> torch.Tensor:
    return torch.arange(48, dtype=torch.float32).reshape(SIZE) + 1000 * layer


def sharded_state(layers: list[int], group_of: Any, *, filled: bool) -> dict[str, Any]:
    def tensor(value: torch.Tensor, dim: int | None) -> torch.Tensor:
        content = value if filled else torch.zeros_like(value)
        if group_of is None:
            return content
        return distribute_tensor(content, group_of, [Replicate() if dim is None else Shard(dim)])

    model = {f"layers.{layer}.weight": tensor(whole(layer), layer % 2) for layer in layers}
    model |= {f"layers.{layer}.norm": tensor(whole(layer)[0], None) for layer in layers}
    moments = {f"state.layers.{layer}.weight.exp_avg": tensor(-whole(layer), layer % 2) for layer in layers}
    return {"model": model, "optimizer": moments, "step": 5 if filled else 0}


def assert_filled(state: dict[str, Any], layers: list[int]) -> None:
    def content(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    for layer in layers:
        assert torch.equal(content(state["model"][f"layers.{layer}.weight"]), whole(layer))
        assert torch.equal(content(state["model"][f"layers.{layer}.norm"]), whole(layer)[0])
        assert torch.equal(content(state["optimizer"][f"state.layers.{layer}.weight.exp_avg"]), -whole(layer))
    assert state["step"] == 5


def save_on_four(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "tensor"))
    stage = mesh["pipeline"].get_local_rank()
    state = sharded_state([2 * stage, 2 * stage + 1], mesh["tensor"], filled=True)
    store = CheckpointStore(folder, keep_last=2)
    stored = store.save(5, state, layout=Layout(1, 2, 2), spec=SPEC, loss=1.0, group=dist.group.WORLD)
    return sorted(stored.manifest.files)


def load_on_two(folder: Path) -> int:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    store = CheckpointStore(folder, keep_last=2)
    newest = store.newest(dist.group.WORLD)
    assert newest is not None
    state = sharded_state([0, 1, 2, 3], mesh, filled=False)
    store.load(newest.step, state, dist.group.WORLD)
    assert_filled(state, [0, 1, 2, 3])
    return newest.step


def damaged_on_two(folder: Path) -> tuple[int | None, int]:
    reported: list[str] = []
    store = CheckpointStore(folder, keep_last=2, report=lambda kind, message, data: reported.append(kind))
    newest = store.newest(dist.group.WORLD)
    return newest.step if newest else None, len(reported)


def test_any_layout_loads_what_any_other_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    files = run_ranks(4, save_on_four, tmp_path / "meet-4", folder)
    assert files == [[".metadata", "__0_0.distcp", "__1_0.distcp", "__2_0.distcp", "__3_0.distcp"]] * 4
    store = CheckpointStore(folder, keep_last=2)
    assert store.newest() is not None
    alone = sharded_state([0, 1, 2, 3], None, filled=False)
    store.load(5, alone)
    assert_filled(alone, [0, 1, 2, 3])
    assert run_ranks(2, load_on_two, tmp_path / "meet-2", folder) == [5, 5]
    store.save(6, alone, layout=ONE, spec=SPEC, loss=None)
    flip_a_bit(data_file(folder, 6))  # one of two members reads this file; both must hear of it, one reports it
    assert run_ranks(2, damaged_on_two, tmp_path / "meet-again", folder) == [(5, 1), (5, 0)]


def fenced_on_two(folder: Path) -> str:
    answers = iter([True, False])
    store = CheckpointStore(folder, keep_last=2, fence=lambda: next(answers))
    state = sharded_state([dist.get_rank()], None, filled=True)
    try:
        store.save(5, state, layout=Layout(1, 2, 1), spec=SPEC, loss=1.0, group=dist.group.WORLD)
    except FencedError as error:
        return error.code
    return "published"


def test_all_members_hear_that_the_run_was_lost(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    assert run_ranks(2, fenced_on_two, tmp_path / "meet", folder) == ["fenced", "fenced"]
    assert list(folder.iterdir()) == []


def test_errors_travel_between_processes_whole() -> None:
    with pytest.raises(SpecError) as caught:
        load_spec("/nowhere.yaml")
    copy = pickle.loads(pickle.dumps(caught.value))
    assert type(copy) is SpecError
    assert (str(copy), copy.problems, copy.code) == (str(caught.value), caught.value.problems, caught.value.code)


def test_the_spec_of_the_manifest_is_that_of_the_curve() -> None:
    def changed(**sections: Any) -> JobSpec:
        content = SPEC.model_dump(mode="json")
        for name, section in sections.items():
            content[name] = {**content[name], **section} if isinstance(section, dict) else section
        return parse_spec(content)

    assert curve_hash(changed(name="other", workers=4, parallelism={"tensor": 2})) == curve_hash(SPEC)
    assert curve_hash(changed(train={"seed": 3})) != curve_hash(SPEC)
    assert curve_hash(changed(train={"steps": 99})) != curve_hash(SPEC)  # cosine decays over all steps
    constant = {"schedule": {"name": "constant"}}
    assert curve_hash(changed(train={"steps": 99}, optimizer=constant)) == curve_hash(changed(optimizer=constant))


def test_old_ones_that_cannot_be_removed_do_not_undo_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str, dict[str, Any]]] = []
    store = CheckpointStore(tmp_path, keep_last=1, report=lambda *what: told.append(what))
    save(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointStore, "_discard", lambda self, path: (tmp_path / "missing" / "x").write_text(""))
        save(store, 2)
    assert steps_in(tmp_path) == [1, 2]
    assert [kind for kind, _, _ in told] == ["checkpoint.not_removed"]
    save(store, 3)
    assert steps_in(tmp_path) == [3]
