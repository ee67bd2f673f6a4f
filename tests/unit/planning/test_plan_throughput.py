"""The time model: cases worked out by hand, published layer times, and what must never get slower."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_cases import GPT_22B, NEUTRAL, PLAIN, SMALL, SMALL_WORK, h100s, plain_cluster

from rubato.arithmetic import BF16, FP16, FP32
from service.planning import compute
from service.planning.accelerators import accelerator
from service.planning.communication import Ring, transfer
from service.planning.compute import Kernels, Passes
from service.planning.constants import fitted
from service.planning.shapes import Cluster, Layout, Runtime, Work
from service.planning.throughput import StepTime, TimeModel


def kernels(**runtime: object) -> Kernels:
    return Kernels(PLAIN, Runtime(**runtime), NEUTRAL)  # type: ignore[arg-type]


def small_model(runtime: Runtime | None = None, cluster: Cluster | None = None, work: Work = SMALL_WORK) -> TimeModel:
    return TimeModel(work, cluster or plain_cluster(), runtime or Runtime(), NEUTRAL)


def test_a_product_takes_its_flops_or_its_operands_and_then_its_result() -> None:
    # 2 x 100 x 200 x 300 FLOPs at 1e12/s, then 2 bytes x 20,000 results at 1e12/s.
    assert kernels().product(rows=100, columns=200, depth=300) == pytest.approx(12e-6 + 0.04e-6)
    # In 32 bits half the rate and twice the bytes.
    assert kernels(precision=FP32).product(100, 200, 300) == pytest.approx(24e-6 + 0.08e-6)
    # One row: 2 bytes x (300 + 60,000) operands take longer than 120,000 FLOPs.
    slow = replace(PLAIN, memory_bandwidth=1e10)
    narrow = Kernels(slow, Runtime(), NEUTRAL).product(1, 200, 300)
    assert narrow == pytest.approx(2 * 60_300 / 1e10 + 2 * 200 / 1e10)


def test_fused_attention_skips_what_the_mask_hides_and_newer_kernels_are_faster() -> None:
    # 4 x (2 x 4 x 64 x 64) x 16 FLOPs, half of them masked, at half of 2e12/s.
    forward = 4 * 2 * 4 * 64 * 64 * 16 / 2 / 1e12
    second = kernels(attention="flash2").attention(2, 64, 64, 4, 16)
    assert second.forward == pytest.approx(forward)
    assert second.backward == pytest.approx(2.5 * forward)
    assert kernels(attention="flash1").attention(2, 64, 64, 4, 16).forward == pytest.approx(2 * forward)

    hopper = Kernels(accelerator("h100"), Runtime(attention="flash2"), NEUTRAL).attention(2, 64, 64, 4, 16)
    native = Kernels(accelerator("h100"), Runtime(attention="native"), NEUTRAL).attention(2, 64, 64, 4, 16)
    assert native.forward / hopper.forward == pytest.approx(0.629)


def test_unfused_attention_moves_every_score_and_leaves_the_matrix_units_for_odd_heads() -> None:
    scores = 2 * 4 * 64 * 64
    aligned = kernels(attention="unfused").attention(2, 64, 64, 4, 16)
    assert aligned.forward == pytest.approx(4 * scores * 16 / 1e12 + 11 * scores / 1e12)
    assert aligned.backward == pytest.approx(8 * scores * 16 / 1e12 + 18 * scores / 1e12)
    odd = kernels(attention="unfused").attention(2, 64, 64, 4, 12)
    assert odd.forward == pytest.approx(4 * scores * 12 / 0.1e12 + 11 * scores / 1e12)


def test_a_layer_is_its_products_its_attention_and_its_element_wise_kernels() -> None:
    # Queries, keys, values; output; gate and up; down: inputs and outputs of the products of a gated model.
    products = [(512, 3 * 512), (512, 512), (512, 2 * 1536), (1536, 512)]
    forward = sum(2 * 256 * i * o / 1e12 + 2 * 256 * o / 1e12 for i, o in products)
    core = kernels().attention(1, 256, 256, 8, 64)
    # Ten passes over the hidden states, three over the MLP's, eight over queries and keys for rotary embeddings.
    passes = 10 * 512 + 3 * 1536 + 8 * 2 * 512
    whole, found = compute.layer(kernels(), SMALL, Layout(), 256)
    assert found == core
    assert whole.forward == pytest.approx(forward + core.forward + 2 * 256 * passes / 1e12)
    plain = replace(SMALL, gated=False)
    without = compute.layer(kernels(), plain, Layout(), 256)[0].forward
    gate = 2 * 256 * 512 * 1536 / 1e12 + 2 * 256 * 1536 / 1e12
    assert whole.forward - without == pytest.approx(gate + 2 * 256 * (1536 + 8 * 2 * 512) / 1e12)
    fused = compute.layer(kernels(compiled=True), SMALL, Layout(), 256)[0].forward
    assert whole.forward - fused == pytest.approx(2 * 256 * (4 * 512 + 6 * 2 * 512) / 1e12)


def test_the_head_is_a_product_and_a_loss_that_moves_every_logit() -> None:
    product = kernels().linear(256, 512, 1024)
    eager = compute.head(kernels(), SMALL, Layout(), 256)
    assert eager.total == pytest.approx(product.total + 36 * 256 * 1024 / 1e12)
    compiled = compute.head(kernels(compiled=True), SMALL, Layout(), 256)
    assert compiled.total == pytest.approx(product.total + 12 * 256 * 1024 / 1e12)
    split = compute.head(kernels(), SMALL, Layout(tensor=4), 256)
    assert split.total == pytest.approx(kernels().linear(256, 512, 256).total + 9 * 256 * 1024 / 1e12)


def test_a_ring_is_as_fast_as_its_slowest_cut() -> None:
    cluster = plain_cluster(16)
    # Inside a node: 3/4 of a message through one link.
    assert Ring(cluster, NEUTRAL, size=4, stride=1).gather(4e9) == pytest.approx(3.0)
    # Over four nodes, one rank in each: its own network port.
    assert Ring(cluster, NEUTRAL, size=4, stride=4).gather(4e9) == pytest.approx(30.0)
    # Over four nodes, all ranks of each: four ports together.
    assert Ring(cluster, NEUTRAL, size=16, stride=1).gather(4e9) == pytest.approx(4e9 * 15 / 16 / 4e8)
    assert Ring(cluster, NEUTRAL, size=4, stride=1).reduce(4e9) == pytest.approx(6.0)
    assert Ring(cluster, NEUTRAL, size=1, stride=1).reduce(4e9) == 0
    slow = replace(NEUTRAL, hop_latency_s=0.5, link_share=0.5)
    assert Ring(cluster, slow, size=4, stride=1).gather(4e9) == pytest.approx(6.0 + 3 * 0.5)


def test_a_transfer_leaves_the_node_when_the_neighbour_is_outside() -> None:
    assert transfer(plain_cluster(), NEUTRAL, stride=2, message=1e9) == pytest.approx(1.0)
    assert transfer(plain_cluster(), NEUTRAL, stride=4, message=1e9) == pytest.approx(10.0)


def test_one_worker_spends_its_step_on_layers_head_and_optimizer_alone() -> None:
    model = small_model()
    layer, head = model.layer(Layout())
    step = model.step(Layout())
    assert step.seconds == pytest.approx(16 * (8 * layer.total + head.total) + step.optimizer)
    # 30 bytes for each parameter, both embeddings being at most on one rank.
    held = 8 * SMALL.layer_parameters + SMALL.embedding_parameters
    assert step.optimizer == pytest.approx(30 * held / 1e12)
    assert step.bubble == step.data_communication == step.replica_communication == step.recomputation == 0


def test_a_pipeline_fills_and_drains_around_its_slowest_stage() -> None:
    model = small_model(cluster=replace(plain_cluster(), network_bytes=1e30))
    layout = Layout(pipeline=4)
    layer, head = model.layer(layout)
    neighbour = 2 * 2 * 256 * 512 / 1e9
    usual, slowest = 2 * layer.total + neighbour, 2 * layer.total + neighbour + head.total
    step = model.step(layout)
    assert step.bubble == pytest.approx(3 * usual)
    assert step.seconds - step.optimizer == pytest.approx(16 * slowest + 3 * usual)


def test_interleaving_divides_the_bubble_and_multiplies_the_transfers() -> None:
    model = small_model()
    plain, interleaved = Layout(pipeline=4), Layout(pipeline=4, schedule="interleaved", virtual_stages=2)
    more = model.step(interleaved).replica_communication / model.step(plain).replica_communication
    assert more == pytest.approx(2.0)
    layer, head = model.layer(plain)
    neighbour = 4 * 2 * 256 * 512 / 1e9
    assert model.step(interleaved).bubble == pytest.approx(3 * (2 * layer.total + neighbour) / 2)
    assert head.total > 0


def test_uneven_stages_cost_what_the_longest_takes() -> None:
    model = small_model()
    even, uneven = model.step(Layout(pipeline=2)), model.step(Layout(pipeline=2, stage_layers=(7, 1)))
    assert uneven.computation > even.computation


def test_recomputation_does_again_what_it_names() -> None:
    to_the_end = small_model(Runtime(attention="unfused", early_stop=False))
    whole, core = compute.layer(kernels(attention="unfused"), SMALL, Layout(), 256)
    assert to_the_end.layer(Layout(recompute="selective"))[0].recomputation == pytest.approx(core.forward)
    assert to_the_end.layer(Layout(recompute="full"))[0].recomputation == pytest.approx(whole.forward)
    assert to_the_end.layer(Layout())[0].recomputation == 0
    # Stopping early leaves out the product [256, 1536] x [1536, 512] and the residual's three passes.
    early = small_model(Runtime(attention="unfused")).layer(Layout(recompute="full"))[0].recomputation
    saved = 2 * 256 * 512 * 1536 / 1e12 + 2 * 256 * 512 / 1e12 + 3 * 2 * 256 * 512 / 1e12
    assert whole.forward - early == pytest.approx(saved)


def test_tensor_parallelism_reduces_twice_each_pass_and_once_more_when_recomputing() -> None:
    # 2 bytes x 256 tokens x 512 wide over a ring of 2: half each way, there and back.
    once = 2 * (2 * 256 * 512) * (1 / 2) * 2 / 1e9
    plain = small_model().layer(Layout(tensor=2))[0].communication
    assert plain == Passes(pytest.approx(once), pytest.approx(once))
    again = small_model(Runtime(early_stop=False)).layer(Layout(tensor=2, recompute="full"))[0].communication
    assert again == Passes(pytest.approx(once), pytest.approx(2 * once))
    early = small_model().layer(Layout(tensor=2, recompute="full"))[0].communication
    assert early == Passes(pytest.approx(once), pytest.approx(1.5 * once))
    # Beside the products of weight gradients half of it shows, or what is longer than these.
    beside = Runtime(overlapped_tensor=True)
    hidden = small_model(beside).layer(Layout(tensor=2))[0].communication
    assert hidden == Passes(pytest.approx(once), pytest.approx(once / 2))
    slow = replace(plain_cluster(), accelerator=replace(PLAIN, link_bytes=1e8))
    whole, core = compute.layer(kernels(), SMALL, Layout(tensor=2), 256)
    longer = small_model(beside, slow).layer(Layout(tensor=2))[0].communication.backward
    assert longer == pytest.approx(10 * once - (whole.forward - core.forward) / 2)


def test_sequence_parallelism_saves_memory_bound_work_only() -> None:
    split = small_model().layer(Layout(tensor=4, sequence_parallel=True))[0]
    whole = small_model().layer(Layout(tensor=4))[0]
    assert split.communication == whole.communication
    assert split.kernels.forward < whole.kernels.forward


def test_context_parallelism_splits_tokens_and_passes_keys_and_values_around() -> None:
    split, whole = small_model().layer(Layout(context=2))[0], small_model().layer(Layout())[0]
    keys_and_values = 2 * 2 * 256 * 512 / 2 / 1e9
    assert split.communication == Passes(pytest.approx(keys_and_values / 2), pytest.approx(keys_and_values))
    assert split.kernels.forward < whole.kernels.forward


def test_gradients_and_updated_parameters_travel_once_a_step_below_zero_2() -> None:
    held = (4 * SMALL.layer_parameters + SMALL.embedding_parameters) / 1
    model = small_model()
    none, first = model.step(Layout(pipeline=2, data=2)), model.step(Layout(pipeline=2, data=2, zero=1))
    # A pipeline hides nothing. 4-byte gradients reduced; with ZeRO 1 scattered, and 2-byte parameters gathered.
    assert none.data_communication == pytest.approx(2 * 4 * held / 2 / 1e9)
    assert first.data_communication == pytest.approx((4 + 2) * held / 2 / 1e9)
    assert first.optimizer == pytest.approx(none.optimizer / 2)


def test_what_is_hidden_is_exposed_by_a_share_and_what_is_longer_whole() -> None:
    fast = replace(plain_cluster(), accelerator=replace(PLAIN, link_bytes=1e15))
    slow = replace(plain_cluster(), accelerator=replace(PLAIN, link_bytes=1e3))
    third = Layout(data=2, zero=3)
    gather = 2 * SMALL.layer_parameters / 2
    scatter = 4 * SMALL.layer_parameters / 2
    head = 0.5 * (2 * 2 + 4) * SMALL.embedding_parameters / 2
    quick = small_model(cluster=fast).step(third).data_communication
    assert quick == pytest.approx(8 * (8 * 0.5 * (2 * gather + scatter) + head) / 1e15)
    layer = small_model(cluster=slow).layer(third)[0]
    long = small_model(cluster=slow).step(third).data_communication
    per_layer = (2 * gather + scatter) / 1e3 - 0.5 * (layer.forward + layer.backward)
    assert long == pytest.approx(8 * (8 * per_layer + head / 1e3))


def test_zero_2_gathers_half_as_often_as_zero_3() -> None:
    fast = replace(plain_cluster(), accelerator=replace(PLAIN, link_bytes=1e15))
    second = small_model(cluster=fast).step(Layout(data=2, zero=2)).data_communication
    third = small_model(cluster=fast).step(Layout(data=2, zero=3)).data_communication
    assert second / third == pytest.approx((2 + 4) / (2 + 2 + 4))


def test_hosts_that_wait_for_every_kernel_leave_longer_gaps() -> None:
    waiting = small_model(Runtime(launch_blocking=True))
    assert waiting.layer(Layout())[0].gap.total == pytest.approx(1e-3)
    assert waiting.layer(Layout(tensor=4))[0].gap.total == pytest.approx(4e-3)
    assert waiting.layer(Layout(recompute="full"))[0].gap.total == pytest.approx(4e-3 / 3)


def test_data_neighbours_in_a_node_are_faster_than_across() -> None:
    model = small_model(cluster=plain_cluster(16))
    spread = Layout(tensor=1, pipeline=4, data=4)
    assert model.step(replace(spread, data_inner=True)).data_communication < model.step(spread).data_communication


def test_the_parts_of_a_step_add_up() -> None:
    step = small_model().step(Layout(tensor=2, pipeline=2, data=2, zero=1, recompute="full"))
    assert step.seconds == pytest.approx(sum(getattr(step, field.name) for field in fields(StepTime)))
    assert all(getattr(step, field.name) >= 0 for field in fields(StepTime))


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "forward_ms", "backward_ms"),
    [
        ("none", False, 7.7, 11.9),
        ("none", True, 7.2, 11.8),
        ("full", False, 7.7, 19.5),
        ("selective", False, 7.7, 13.2),
        ("selective", True, 7.2, 13.1),
    ],
)
def test_a_layer_of_gpt_22b_takes_what_was_published(
    recompute: str, sequence_parallel: bool, forward_ms: float, backward_ms: float
) -> None:
    """Korthikanti et al. 2022 (arXiv:2205.05198), table 4: eight A100, tensor 8, micro-batch 4, fp16."""
    runtime = Runtime(attention="unfused", precision=FP16, early_stop=False, overlapped_tensor=True)
    cluster = Cluster.of(accelerator("a100-80gb"), 8)
    model = TimeModel(Work(GPT_22B, 2048, 4), cluster, runtime, fitted())
    layout = Layout(tensor=8, micro_batch=4, recompute=recompute, sequence_parallel=sequence_parallel)  # type: ignore[arg-type]
    layer, _ = model.layer(layout)
    assert layer.forward * 1e3 == pytest.approx(forward_ms, rel=0.12)
    assert layer.backward * 1e3 == pytest.approx(backward_ms, rel=0.12)


layouts = st.builds(
    Layout,
    tensor=st.sampled_from([1, 2, 4]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    micro_batch=st.sampled_from([1, 2]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
)


@given(layouts, st.sampled_from(["matmul_flops", "memory_bandwidth", "link_bytes", "peak_flops"]))
def test_a_better_device_is_never_slower(layout: Layout, improved: str) -> None:
    better = replace(PLAIN, **{improved: 2 * getattr(PLAIN, improved)})
    runtime = Runtime(precision=BF16)
    now = TimeModel(SMALL_WORK, plain_cluster(), runtime, NEUTRAL).step(layout).seconds
    then = TimeModel(SMALL_WORK, replace(plain_cluster(), accelerator=better), runtime, NEUTRAL).step(layout).seconds
    assert then <= now * (1 + 1e-9)


@given(layouts)
def test_recomputing_is_never_faster_and_a_bound_never_too_high(layout: Layout) -> None:
    model = TimeModel(SMALL_WORK, h100s(64), Runtime(attention="unfused"), fitted())
    modes = [model.step(replace(layout, recompute=mode)).seconds for mode in ("none", "selective", "full")]
    assert modes == sorted(modes)
    slowest, bubble = model.bound(layout)
    assert layout.micro_batches(16) * slowest + bubble <= model.step(layout).seconds * (1 + 1e-9)
