"""What was measured of a cluster becomes an accelerator and constants that give the measurements back."""

from __future__ import annotations

import pytest
from measured import calibration

from rubato.arithmetic import FP32, Decoder
from rubato.problems import RubatoError
from rubato.resources import NodeView
from rubato.spec import WorkersSpec
from service.planning.accelerators import catalogue
from service.planning.calibration import measured_by
from service.planning.constants import fitted
from service.planning.fleet import live_fleet
from service.planning.shapes import Cluster, Layout, Runtime, Work
from service.planning.throughput import TimeModel

RUNTIME = Runtime(precision=FP32)


def model_of(workers: int, layers: int = 4, cores: float = 2.0) -> TimeModel:
    name, found = measured_by(calibration(together={}))
    assert name == "cpu-core"
    work = Work(Decoder(layers, 256, 8, 8, 1024, 256), 256, 16)
    cluster = Cluster(found.accelerator, workers, workers, 1e9, cores)
    return TimeModel(work, cluster, RUNTIME, found.constants)


def test_the_layer_that_was_measured_is_predicted_to_take_what_it_took() -> None:
    model = model_of(1)
    layer, head = model.layer(Layout(micro_batch=4))
    assert layer.total == pytest.approx(0.2, rel=1e-3)
    assert head.total > 2e-3  # what embedding and head cost the host is in it


def test_overheads_of_hosts_count_where_they_were_measured() -> None:
    _, found = measured_by(calibration(together={}))
    constants = found.constants
    assert constants.layer_gap_s == 1e-3
    assert constants.hop_latency_s == pytest.approx(1e-4 / 1.25)
    assert constants.tensor_gap_s == pytest.approx(0.01 / 1.25 - 1e-3 - 4 * 1e-4 / 1.25)
    assert constants.handover_s == pytest.approx(0.01 / 1.25 - 3e-3 - 2e-4 / 1.25)
    assert constants.attention_share == 0.5
    assert found.cores == pytest.approx(2 / 1.25)
    assert found.accelerator.link_bytes == pytest.approx(1.25e9)
    model = model_of(2)
    whole, split = (model.layer(layout)[0] for layout in (Layout(), Layout(tensor=2)))
    assert split.gap.total == pytest.approx(whole.gap.total + constants.tensor_gap_s)


def test_one_worker_alone_tells_of_no_links() -> None:
    _, found = measured_by(calibration())
    assert found.constants.tensor_gap_s == found.constants.handover_s == 0.0
    assert found.accelerator.link_bytes == catalogue()["cpu-core"].link_bytes


def test_workers_that_share_cores_are_predicted_to_be_slower_together() -> None:
    nodes = [NodeView(id="n", ip="-", alive=True, cpus=4, gpus=0, cpus_free=4, gpus_free=0)]
    fleet = live_fleet(nodes, WorkersSpec(min=1, max=4), dict([measured_by(calibration(together={}))]))
    assert fleet is not None
    assert fleet.calibrated
    one, two, four = (fleet.cluster(workers).accelerator.single_flops for workers in (1, 2, 4))
    assert (two / one, four / one) == (pytest.approx(0.8), pytest.approx(0.4))
    assert fleet.constants_for(4).layer_gap_s == pytest.approx(1e-3 / 0.4)


def test_ranks_that_wait_in_a_bubble_leave_their_cores_to_the_others() -> None:
    crowded = model_of(4, cores=2.0).step(Layout(pipeline=4))
    roomy = model_of(4, cores=4.0).step(Layout(pipeline=4))
    assert crowded.bubble == pytest.approx(roomy.bubble / 2)
    assert model_of(4).step(Layout(data=4)).bubble == 0.0


def test_of_a_gpu_its_rates_are_taken_and_the_fitted_constants_stay() -> None:
    gpu = {"device": "NVIDIA H100 80GB HBM3", "half_flops": 7e14}
    name, found = measured_by(calibration(alone=gpu, together={"link_bytes": 3e11}))
    assert name == "h100-80gb"
    assert found.constants == fitted()
    assert found.accelerator.matmul_flops == 7e14
    assert found.accelerator.memory_bytes == catalogue()[name].memory_bytes
    assert found.accelerator.link_bytes == pytest.approx(3e11 / fitted().link_share)
    with pytest.raises(RubatoError, match="T4"):
        measured_by(calibration(alone={"device": "Tesla T4"}))
