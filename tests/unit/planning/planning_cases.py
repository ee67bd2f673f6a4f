"""Models, clusters and constants the planner's tests share; constants are round, so that results can be worked out."""

from __future__ import annotations

from rubato.arithmetic import Decoder
from service.planning.accelerators import accelerator
from service.planning.constants import Constants
from service.planning.shapes import Accelerator, Cluster, Work

LLAMA_8B = Decoder(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_70B = Decoder(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)
GPT3_175B = Decoder(layers=96, hidden=12288, heads=96, kv_heads=96, ffn=49152, vocab=51200, gated=False, tied=True)
GPT_22B = Decoder(layers=48, hidden=6144, heads=64, kv_heads=64, ffn=24576, vocab=51200, gated=False, tied=True)
SMALL = Decoder(layers=8, hidden=512, heads=8, kv_heads=8, ffn=1536, vocab=1024)

# A device whose numbers are powers of ten, and constants that change nothing.
PLAIN = Accelerator(
    name="plain",
    memory_bytes=10e9,
    context_bytes=1e9,
    peak_flops=2e12,
    matmul_flops=1e12,
    single_flops=0.5e12,
    vector_flops=0.1e12,
    memory_bandwidth=1e12,
    link_bytes=1e9,
    network_bytes=1e8,
    node_size=4,
)
NEUTRAL = Constants(
    matmul_share=1.0,
    memory_bandwidth_share=1.0,
    attention_share=0.5,
    layer_gap_s=0.0,
    blocking_gap_s=1e-3,
    link_share=1.0,
    hop_latency_s=0.0,
    exposed_share=0.5,
    activation_factor=1.0,
    reserved_share=0.0,
)


def plain_cluster(count: int = 8) -> Cluster:
    return Cluster.of(PLAIN, count)


def h100s(count: int) -> Cluster:
    return Cluster.of(accelerator("h100"), count)


SMALL_WORK = Work(SMALL, sequence=256, global_batch=16)
