"""What a run can say of itself: work done, how much of the machine that is, and what happened."""

from workers.engine.watch.flops import flops_per_token, model_flops_utilization
from workers.engine.watch.log import log_to_stderr
from workers.engine.watch.peak import measured_peak, peak_flops
from workers.engine.watch.throughput import Throughput

__all__ = [
    "Throughput",
    "flops_per_token",
    "log_to_stderr",
    "measured_peak",
    "model_flops_utilization",
    "peak_flops",
]
