"""Attention of packed sequences on a CPU: matrix products by torch, of blocks that stay in cache.

[Note: blocks]

Sequences of similar length are computed together, padded (`layout.py`), in chunks whose square matrices stay in the
second cache; of long sequences a block of rows at a time, each as wide as its last row reaches. Biases are written
first, and far below zero above the diagonal, where both activations become 0, and so do their gradients. The product of
queries and keys is added to them. Nothing is kept for the backward pass but what came in: weights are computed again.

Biases by position and by buckets of time, and their gradients, are one pass in Numba over a block. Along a row the
bucket is that of the event before, or a few more; so it is found without a logarithm, whatever the order of times.
Gradients of tables are sums in float64, in the order of the sequences by length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from rowmesh.ops.sequence_attention.bias import Bias, bucket_starts
from rowmesh.ops.sequence_attention.layout import Chunk, Layout
from rowmesh.ops.sequence_attention.reference import num_channels
from rowmesh.ops.simd import kernel

MOST_ELEMENTS = 1 << 16  # of the weights of a block, of all heads
_LEAST_ROWS = 16
_OUTSIDE = -1e30  # plus a product: so far below 0 that its activation is 0


@kernel
def fill(out, first_row, positions, time, starts, times, asked, outside):
    """Writes the biases of a block `[S, R, W]`; tables that are left out have no elements."""
    last = positions.size // 2
    for s in range(out.shape[0]):
        for i in range(out.shape[1]):
            row = first_row + i
            line = out[s, i]
            if positions.size:
                base = last - row
                for j in range(row + 1):
                    line[j] = positions[base + j]
            else:
                for j in range(row + 1):
                    line[j] = 0
            for j in range(row + 1, out.shape[2]):
                line[j] = outside
            if time.size:
                k = 0
                for j in range(row, -1, -1):
                    duration = abs(asked[s, row] - times[s, j])
                    while k + 1 < starts.size and duration >= starts[k + 1]:
                        k += 1
                    while duration < starts[k]:
                        k -= 1
                    line[j] += time[k]


@kernel
def add_gradients(grad, first_row, of_positions, of_time, starts, times, asked):
    """Adds the gradient `[S, H, R, W]` of a block to float64 sums of those of the tables."""
    last = of_positions.size // 2
    for s in range(grad.shape[0]):
        for i in range(grad.shape[2]):
            row = first_row + i
            if of_positions.size:
                base = last - row
                for h in range(grad.shape[1]):
                    line = grad[s, h, i]
                    for j in range(row + 1):
                        of_positions[base + j] += line[j]
            if of_time.size:
                k, total = 0, 0.0
                for j in range(row, -1, -1):
                    duration = abs(asked[s, row] - times[s, j])
                    if (k + 1 < starts.size and duration >= starts[k + 1]) or duration < starts[k]:
                        of_time[k] += total
                        total = 0.0
                        while k + 1 < starts.size and duration >= starts[k + 1]:
                            k += 1
                        while duration < starts[k]:
                            k -= 1
                    for h in range(grad.shape[1]):
                        total += grad[s, h, i, j]
                of_time[k] += total


@dataclass(frozen=True)
class Call:
    """The arguments of a call of `attend`.

    Attributes:
        values: `[P, H, D]`, padded as the layout has it; so are queries and keys `[P, H, K]`, or None.
        activation: of products.
        divisor: of silu; None: the length of the sequence.
        bias: its times, too, padded.
    """

    layout: Layout
    values: Tensor
    queries: Tensor | None
    keys: Tensor | None
    activation: str
    divisor: float | None
    bias: Bias

    def chunks(self) -> Iterator[tuple[Chunk, int]]:
        """Chunks, and of each how many rows a block has."""
        most = MOST_ELEMENTS // self.values.shape[1]
        for chunk in self.layout.chunks(most):
            yield chunk, min(max(most // chunk.length, _LEAST_ROWS), chunk.length)

    def heads(self, tensor: Tensor | None, chunk: Chunk) -> Tensor | None:
        """`[S H, L, ·]` of a chunk."""
        if tensor is None:
            return None
        part = tensor[chunk.events].view(chunk.num, chunk.length, *tensor.shape[1:])
        return part.transpose(1, 2).reshape(-1, chunk.length, tensor.shape[2])

    def factor(self, chunk: Chunk) -> Tensor | float:
        """The factors of silu, for `[S, …]` of four dimensions."""
        if self.activation == "softmax":
            return 1.0
        if self.divisor is not None:
            return 1 / self.divisor
        lengths = self.layout.lengths[chunk.group : chunk.group + chunk.num]
        return (1 / lengths.to(self.values.dtype)).view(-1, 1, 1, 1)


def forward(call: Call) -> Tensor:
    """`[P, C, H, D]`; rows of padding hold numbers without meaning."""
    _, heads, dim = call.values.shape
    channels = num_channels(call.queries is not None, call.bias)
    out = call.values.new_empty(call.values.shape[0], channels, heads, dim)
    for chunk, num_rows in call.chunks():
        values, queries, keys = (call.heads(each, chunk) for each in (call.values, call.queries, call.keys))
        assert values is not None
        to = out[chunk.events].view(chunk.num, chunk.length, channels, heads, dim)
        for first in range(0, chunk.length, num_rows):
            end = min(first + num_rows, chunk.length)
            channel = 0
            if queries is not None and keys is not None:
                scores = _scores(call, chunk, queries, keys, first, end)
                weights = F.silu(scores, inplace=True) if call.activation == "silu" else scores.softmax(-1)
                found = torch.bmm(weights, values[:, :end]).view(chunk.num, heads, end - first, dim)
                to[:, first:end, 0] = found.mul_(call.factor(chunk)).transpose(1, 2)
                channel = 1
            if call.bias.separate:
                shared = _shared(call, chunk)
                for weights in _separate(call, chunk, first, end):
                    found = torch.bmm(weights.expand(chunk.num, -1, -1), shared[:, :end])
                    to[:, first:end, channel] = found.view(chunk.num, end - first, heads, dim)
                    channel += 1
    return out


@dataclass(frozen=True)
class Gradients:
    """Gradients of the arguments; None where an argument is None. Gradients of tables are float64."""

    values: Tensor
    queries: Tensor | None
    keys: Tensor | None
    positions: Tensor | None
    time: Tensor | None


def backward(call: Call, grad: Tensor) -> Gradients:
    """From the gradient of the padded output `[P, C, H, D]`, which is 0 for padding."""
    found = Gradients(
        torch.empty_like(call.values),
        None if call.queries is None else torch.empty_like(call.queries),
        None if call.keys is None else torch.empty_like(call.keys),
        None if call.bias.positions is None else torch.zeros_like(call.bias.positions, dtype=torch.float64),
        None if call.bias.time is None else torch.zeros_like(call.bias.time, dtype=torch.float64),
    )
    for chunk, num_rows in call.chunks():
        of_values = _backward_of_products(call, chunk, num_rows, grad, found)
        if call.bias.separate:
            of_values = _backward_of_separate(call, chunk, num_rows, grad, found, of_values)
        assert of_values is not None
        found.values[chunk.events] = of_values.flatten(0, 1)
    return found


def _backward_of_products(call: Call, chunk: Chunk, num_rows: int, grad: Tensor, found: Gradients) -> Tensor | None:
    """Gradient of the values `[S, L, H, D]`; writes those of queries and keys."""
    queries, keys, values = (call.heads(each, chunk) for each in (call.queries, call.keys, call.values))
    if queries is None or keys is None or values is None:
        return None
    heads = call.values.shape[1]
    lines = grad[chunk.events, 0].view(chunk.num, chunk.length, heads, -1).transpose(1, 2)
    lines = (lines * call.factor(chunk)).reshape(values.shape)
    of_queries, of_keys, of_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
    for first in range(0, chunk.length, num_rows):
        end = min(first + num_rows, chunk.length)
        scores = _scores(call, chunk, queries, keys, first, end)
        of_weights = torch.bmm(lines[:, first:end], values[:, :end].transpose(1, 2))
        if call.activation == "silu":
            weights = F.silu(scores)
            of_scores = torch.ops.aten.silu_backward(of_weights, scores)
        else:
            weights = scores.softmax(-1)
            of_scores = torch.ops.aten._softmax_backward_data(of_weights, weights, -1, weights.dtype)
        of_values[:, :end].baddbmm_(weights.transpose(1, 2), lines[:, first:end])
        of_queries[:, first:end] = torch.bmm(of_scores, keys[:, :end])
        of_keys[:, :end].baddbmm_(of_scores.transpose(1, 2), queries[:, first:end])
        if not call.bias.separate:
            _add_bias_gradients(call, chunk, first, of_scores.view(chunk.num, heads, end - first, end), found)
    assert found.queries is not None
    assert found.keys is not None
    for to, each in ((found.queries, of_queries), (found.keys, of_keys)):
        to[chunk.events] = _by_event(each, chunk, heads).flatten(0, 1)
    return _by_event(of_values, chunk, heads)


def _backward_of_separate(
    call: Call, chunk: Chunk, num_rows: int, grad: Tensor, found: Gradients, of_values: Tensor | None
) -> Tensor:
    """Adds the gradient of the values that channels of their own have."""
    shared = _shared(call, chunk)
    total = torch.zeros_like(shared) if of_values is None else of_values.reshape(shared.shape).contiguous()
    first_channel = int(call.queries is not None)
    tables = [each for each in (found.positions, found.time) if each is not None]
    for first in range(0, chunk.length, num_rows):
        end = min(first + num_rows, chunk.length)
        for number, weights in enumerate(_separate(call, chunk, first, end)):
            lines = grad[chunk.events, first_channel + number].view(*shared.shape[:2], -1)[:, first:end]
            total[:, :end].baddbmm_(weights.expand(chunk.num, -1, -1).transpose(1, 2), lines)
            of_weights = torch.bmm(lines, shared[:, :end].transpose(1, 2)).unsqueeze(1)
            is_positions = tables[number] is found.positions
            only = Gradients(
                found.values,
                None,
                None,
                found.positions if is_positions else None,
                None if is_positions else found.time,
            )
            _add_bias_gradients(call, chunk, first, of_weights, only)
    return total.view(chunk.num, chunk.length, *call.values.shape[1:])


def _shared(call: Call, chunk: Chunk) -> Tensor:
    """`[S, L, H D]`: the values of all heads, which share weights by position and time."""
    return call.values[chunk.events].view(chunk.num, chunk.length, -1)


def _by_event(tensor: Tensor, chunk: Chunk, heads: int) -> Tensor:
    return tensor.view(chunk.num, heads, chunk.length, -1).transpose(1, 2)


def _scores(call: Call, chunk: Chunk, queries: Tensor, keys: Tensor, first: int, end: int) -> Tensor:
    """`[S H, R, W]`: products and biases of rows first to end; far below 0 above the diagonal."""
    bias = Bias() if call.bias.separate else call.bias
    heads = call.values.shape[1]
    has_time = bias.time is not None
    scores = _filled(call, chunk if has_time else chunk._replace(num=1), bias, first, end, _OUTSIDE)
    if heads > 1 or scores.shape[0] < chunk.num:
        shape = (chunk.num, heads, end - first, end)
        scores = scores.new_empty(shape).copy_(scores.unsqueeze(1)).flatten(0, 1)
    return scores.baddbmm_(queries[:, first:end], keys[:, :end].transpose(1, 2))


def _separate(call: Call, chunk: Chunk, first: int, end: int) -> Iterator[Tensor]:
    """Weights by position `[1, R, W]` and by time `[S, R, W]`, those that there are."""
    bias = call.bias
    if bias.positions is not None:
        yield _filled(call, chunk._replace(num=1), Bias(positions=bias.positions), first, end, 0.0)
    if bias.time is not None:
        yield _filled(call, chunk, Bias(time=bias.time, form=bias.form, unit=bias.unit), first, end, 0.0)


def _filled(call: Call, chunk: Chunk, bias: Bias, first: int, end: int, outside: float) -> Tensor:
    out = call.values.new_empty(chunk.num, end - first, end)
    is_function = bias.time is not None and bias.form != "buckets"
    tables = _array(bias.positions, out), _array(None if is_function else bias.time, out)
    fill(out.numpy(), first, *tables, _STARTS, *_times(call, chunk), outside)
    if is_function:
        assert bias.time is not None
        out += _Decay(call, chunk, first, end).weights(bias.time).tril_(first)
    return out


def _add_bias_gradients(call: Call, chunk: Chunk, first: int, grad: Tensor, found: Gradients) -> None:
    """Adds those of `[S, H, R, W]`."""
    time = found.time
    if time is not None and call.bias.form != "buckets":
        assert call.bias.time is not None
        decay = _Decay(call, chunk, first, grad.shape[3])
        time += decay.gradient(call.bias.time, grad.sum(1).tril_(first))
        time = None
    if found.positions is not None or time is not None:
        none = np.empty(0)
        tables = (none if each is None else each.numpy() for each in (found.positions, time))
        add_gradients(grad.numpy(), first, *tables, _STARTS, *_times(call, chunk))


class _Decay:
    """A function of time of a block."""

    def __init__(self, call: Call, chunk: Chunk, first: int, end: int) -> None:
        times, asked = (torch.from_numpy(each) for each in _times(call, chunk))
        steps = (asked[:, first:end, None] - times[:, None, :end]).abs_().to(call.values.dtype).div_(call.bias.unit)
        self._exponents = steps.log1p_() if call.bias.form == "power" else steps

    def weights(self, time: Tensor) -> Tensor:
        """`a e^(−b x)`."""
        a, b = time.tolist()
        return (self._exponents * -b).exp_().mul_(a)

    def gradient(self, time: Tensor, grad: Tensor) -> Tensor:
        """The gradient of a and b, in float64."""
        a, b = time.tolist()
        products = (self._exponents * -b).exp_().mul_(grad)
        of_a = products.sum(dtype=torch.float64)
        return torch.stack([of_a, products.mul_(self._exponents).sum(dtype=torch.float64) * -a])


_NO_TIMES = np.empty((0, 0), np.int64)
_STARTS = bucket_starts().numpy()


def _times(call: Call, chunk: Chunk) -> tuple[np.ndarray, np.ndarray]:
    """`[S, L]`: when events were, and when what follows is asked for."""
    if call.bias.times is None:
        return _NO_TIMES, _NO_TIMES
    asked = call.bias.times if call.bias.query_times is None else call.bias.query_times
    shape = (chunk.num, chunk.length)
    return call.bias.times[chunk.events].view(shape).numpy(), asked[chunk.events].view(shape).numpy()


def _array(table: Tensor | None, like: Tensor) -> np.ndarray:
    return like.new_empty(0).numpy() if table is None else table.numpy()
