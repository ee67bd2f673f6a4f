"""A step without a device: what memory and communication a layout comes to, worked out on tensors that hold nothing."""

from workers.engine.tracing.trace import StageTrace, trace_stage

__all__ = ["StageTrace", "trace_stage"]
