"""What a card reaches, for floors and estimates: measured once a process, in about half a second."""

from __future__ import annotations

import functools

import torch

from moesaic.passes.cost_model import Card
from moesaic.runtime.graph_timer import GraphTimer

_COPIED = 2**26  # floats of a copy: far more than a cache holds
_SIZE = 4096  # of a dense product


def card_of(device: torch.device) -> Card:
    """The ceilings of a device; the nominal ones where there is no GPU."""
    if device.type != "cuda":
        return Card()
    return _measured(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _measured(index: int) -> Card:
    with torch.cuda.device(index):
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        source = torch.randn(_COPIED, device="cuda")
        copied = torch.empty_like(source)
        # A multiplication: torch's own copy of whole tensors is the copy engine's, which is slower.
        copy_us = GraphTimer(lambda i: torch.mul(source, 1.5, out=copied), least_ms=2.0).time(20.0).us
        bandwidth = 8 * _COPIED / (copy_us * 1e-6)
        a, b = (torch.randn(_SIZE, _SIZE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        product_us = GraphTimer(lambda i: a @ b, least_ms=2.0).time(20.0).us
        one = torch.ones(1, device="cuda")
        node_us = GraphTimer(lambda i: one.add_(1.0), least_ms=1.0).time(10.0).us
    clock_hz = Card.clock_hz
    flops = 2.0 * _SIZE**3 / (product_us * 1e-6) / sms / clock_hz
    return Card(sms, clock_hz, bandwidth, flops, Card.l2_bytes, node_us)
