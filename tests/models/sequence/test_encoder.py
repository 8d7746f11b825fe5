"""Each kind of encoder against a transcription of its published formula: one user at a time, padded, in float64."""

import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from rowmesh.errors import ConfigurationError
from rowmesh.models.sequence import KINDS, SequenceEncoder

DIM, HEADS, LONGEST, LENGTHS = 8, 2, 7, [3, 1, 7, 0, 2]
DAY = 86400


def layer_norm(x, norm):
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + norm.eps).sqrt()
    return x * norm.weight + norm.bias


def rms_norm(x, norm):
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def by_head(x):
    """`[H, N, D / H]`."""
    return x.unflatten(1, (HEADS, -1)).transpose(0, 1)


def side_by_side(x):
    return x.transpose(0, 1).flatten(1)


def causal():
    return torch.ones(LONGEST, LONGEST, dtype=torch.float64).tril()


def position_weights(block):
    rows = [[block.positions[j - i + LONGEST - 1] for j in range(LONGEST)] for i in range(LONGEST)]
    return torch.stack([torch.stack(row) for row in rows])


def time_weights(block, times, asked, form):
    """By the formula of each pair."""

    def weight(duration):
        if form == "buckets":
            return block.time[math.floor(math.log(max(abs(duration), 1)) / 0.301)]
        a, b = block.time
        return a * (duration + 1) ** -b if form == "power" else a * torch.exp(-b * duration / DAY)

    rows = [[weight(max(s - t, 0)) for t in times] for s in asked]
    return torch.stack([torch.stack(row) for row in rows])


def sasrec(encoder, x, times, asked, divisor):
    x = x + encoder.positions
    for block in encoder.blocks:
        v, q, k = (layer_norm(x, block.norm) @ block.project.weight.T).split(DIM, dim=1)
        scores = by_head(q) @ by_head(k).transpose(1, 2) / (DIM / HEADS) ** 0.5
        weights = torch.softmax(scores.masked_fill(causal() == 0, -torch.inf), dim=-1)
        x = x + side_by_side(weights @ by_head(v))
        hidden = layer_norm(x, block.norm_ffn) @ block.ffn.first.weight.T + block.ffn.first.bias
        x = x + hidden.clamp(min=0) @ block.ffn.second.weight.T + block.ffn.second.bias
    return layer_norm(x, encoder.norm)


def hstu(encoder, x, times, asked, divisor):
    for block in encoder.blocks:
        u, v, q, k = F.silu(layer_norm(x, block.norm) @ block.project.weight.T).split(DIM, dim=1)
        bias = position_weights(block) + time_weights(block, times, asked, "buckets")
        weights = F.silu(by_head(q) @ by_head(k).transpose(1, 2) + bias) / divisor * causal()
        attention = side_by_side(weights @ by_head(v))
        x = x + (layer_norm(attention, block.norm_attention) * u) @ block.out.weight.T
    return x


def fuxi(encoder, x, times, asked, divisor):
    form = encoder.form
    for block in encoder.blocks:
        u, v, *qk = F.silu(rms_norm(x, block.norm) @ block.project.weight.T).split(block.widths, dim=1)
        channels = [position_weights(block) * causal(), time_weights(block, times, asked, form.time) * causal()]
        attention = [channel @ v for channel in channels]
        if qk:
            weights = F.silu(by_head(qk[0]) @ by_head(qk[1]).transpose(1, 2)) / divisor * causal()
            attention.insert(0, side_by_side(weights @ by_head(v)))
        mixed = rms_norm(torch.cat(attention, dim=1), block.norm_attention) * u
        x = x + mixed @ block.out.weight.T
        gate, linear = (rms_norm(x, block.norm_ffn) @ block.ffn.first.weight.T).chunk(2, dim=1)
        x = x + (F.silu(gate) * linear) @ block.ffn.second.weight.T
    return x


FORMULAS = {"sasrec": sasrec, "hstu": hstu, "fuxi_alpha": fuxi, "fuxi_beta": fuxi}


def draw():
    """Vectors, offsets, times and what is asked for when, of users with LENGTHS events."""
    generator = torch.Generator().manual_seed(1)
    total = sum(LENGTHS)
    vectors = torch.randn(total, DIM, dtype=torch.float64, generator=generator, requires_grad=True)
    offsets = torch.tensor([0, *LENGTHS]).cumsum(0)
    steps = torch.randint(0, 3 * DAY, (total,), generator=generator)
    steps[::3] = 0
    times = 1_400_000_000 + steps.cumsum(0)
    asked = times.clone()
    for first, end in pairwise(offsets.tolist()):
        if end > first:
            asked[first : end - 1] = times[first + 1 : end]
            asked[end - 1] = times[end - 1] + 5000
    return vectors, offsets, times, asked


def transcribed(encoder, vectors, offsets, times, asked, scale):
    found = []
    for first, end in pairwise(offsets.tolist()):
        padding = LONGEST - (end - first)
        x = F.pad(vectors[first:end], (0, 0, 0, padding))
        t = times[first:end].tolist() + [0] * padding
        s = asked[first:end].tolist() + [0] * padding
        divisor = LONGEST if scale == "longest" else max(end - first, 1)
        found.append(FORMULAS[encoder.kind](encoder, x, t, s, divisor)[: end - first])
    return torch.cat(found)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(kind, {}) for kind in KINDS]
    + [
        ("fuxi_beta", {"time": "exponential"}),
        ("hstu", {"scale": "actual"}),
        ("fuxi_alpha", {"scale": "actual", "request_time": False}),
    ],
)
def test_equals_the_formula(kind, options):
    torch.manual_seed(0)
    encoder = SequenceEncoder(kind, DIM, 2, HEADS, LONGEST, **options).double()
    for parameter in encoder.parameters():  # far from where they start, so that all of them matter
        torch.nn.init.normal_(parameter, std=0.5)
    if kind == "fuxi_beta":
        for block in encoder.blocks:
            block.time.data.copy_(torch.tensor([0.7, 0.2]))
    vectors, offsets, times, asked = draw()
    ours = encoder(vectors, offsets, times, asked)
    until = asked if options.get("request_time", True) else times
    theirs = transcribed(encoder, vectors, offsets, times, until, options.get("scale", "longest"))
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
    inputs = [vectors, *encoder.parameters()]
    grad = torch.randn(ours.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for mine, other in zip(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(theirs, inputs, grad), strict=True
    ):
        torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_the_future_changes_nothing(kind):
    torch.manual_seed(0)
    encoder = SequenceEncoder(kind, DIM, 2, HEADS, LONGEST).double()
    vectors, offsets, times, asked = draw()
    later = vectors.detach().clone()
    later[6:] = later[6:].flip(1)  # not a shift, which LayerNorm takes away
    one, other = encoder(vectors, offsets, times, asked), encoder(later, offsets, times, asked)
    assert one[:6].equal(other[:6])
    assert not one[6:11].isclose(other[6:11]).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_user_is_the_same_in_any_batch(kind):
    torch.manual_seed(0)
    encoder = SequenceEncoder(kind, DIM, 1, HEADS, LONGEST).double()
    vectors, offsets, times, asked = draw()
    alone = encoder(vectors[4:11], torch.tensor([0, 7]), times[4:11], asked[4:11])
    torch.testing.assert_close(encoder(vectors, offsets, times, asked)[4:11], alone)


def test_side_features_are_added_to_the_vectors():
    torch.manual_seed(0)
    encoder = SequenceEncoder("fuxi_alpha", DIM, 1, HEADS, LONGEST).double()
    vectors, offsets, times, asked = draw()
    side = [torch.randn_like(vectors), torch.randn_like(vectors)]
    together = encoder(vectors, offsets, times, asked, side)
    torch.testing.assert_close(together, encoder(vectors + side[0] + side[1], offsets, times, asked))
    with pytest.raises(ValueError, match=r"side\[1\] must be \[13, 8\] as vectors are, got \[13, 1\]"):
        encoder(vectors, offsets, times, asked, [side[0], side[1][:, :1]])


def test_the_next_event_asks_where_nothing_is_said():
    torch.manual_seed(0)
    encoder = SequenceEncoder("hstu", DIM, 1, HEADS, LONGEST).double()
    vectors, offsets, times, asked = draw()
    ends = offsets[1:][offsets.diff() > 0] - 1
    asked[ends] = times[ends]
    assert encoder(vectors, offsets, times).equal(encoder(vectors, offsets, times, asked))


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_events_has_zero_gradients(kind):
    encoder = SequenceEncoder(kind, DIM, 1, HEADS, LONGEST)
    times = torch.zeros(0, dtype=torch.int64)
    encoder(torch.zeros(0, DIM), torch.zeros(3, dtype=torch.int64), times).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in encoder.parameters())


def test_dropout_is_drawn_in_training_alone():
    encoder = SequenceEncoder("fuxi_alpha", DIM, 1, HEADS, LONGEST, dropout=0.5).double()
    vectors, offsets, times, _ = draw()
    assert not encoder(vectors, offsets, times).equal(encoder(vectors, offsets, times))
    encoder.eval()
    assert encoder(vectors, offsets, times).equal(encoder(vectors, offsets, times))


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"kind": "hsut"}, "kind must be one of sasrec, hstu, fuxi_alpha, fuxi_beta, got 'hsut'"),
        ({"dim": 0}, "dim must be positive, got 0"),
        ({"num_heads": 3}, "dim 8 does not divide by 3 heads"),
        ({"dropout": 1.0}, "dropout must be at least 0 and below 1"),
        ({"scale": "mean"}, "scale must be 'longest' or 'actual'"),
        ({"kind": "sasrec", "scale": "actual"}, "sasrec: scale is of silu attention, and sasrec has none"),
        ({"kind": "fuxi_beta", "scale": "actual"}, "fuxi_beta: scale is of silu attention, and fuxi_beta has none"),
        ({"time": "power"}, "fuxi_beta alone"),
        ({"time_unit": 0.0}, "time_unit must be positive"),
        ({"time_unit": 60.0}, "hstu: time_unit is of functions of time, of fuxi_beta alone"),
        ({"ffn_dim": 16}, "hstu: ffn_dim is of feed-forward layers, and hstu has none"),
    ],
)
def test_options_that_cannot_work(wrong, says):
    options = {"kind": "hstu", "dim": DIM, "num_blocks": 1, "num_heads": HEADS, "max_length": LONGEST} | wrong
    with pytest.raises(ConfigurationError, match=says):
        SequenceEncoder(**options)


def test_batches_that_cannot_work():
    encoder = SequenceEncoder("hstu", DIM, 1, HEADS, max_length=5).double()
    vectors, offsets, times, _ = draw()
    with pytest.raises(ValueError, match="a user has 7 events, more than max_length 5: cut them at the old end"):
        encoder(vectors, offsets, times)
    with pytest.raises(ValueError, match="hstu weighs events by time: give times"):
        encoder(vectors[:3], torch.tensor([0, 3]))
    with pytest.raises(ValueError, match=r"vectors must be \[T, 8\], got \[3, 4\]"):
        encoder(vectors[:3, :4], torch.tensor([0, 3]), times[:3])
    with pytest.raises(ValueError, match=r"times must be int64 \[3\], got \[2\] of torch.int64"):
        encoder(vectors[:3], torch.tensor([0, 3]), times[:2])
    with pytest.raises(ValueError, match=r"request_times must be int64 \[3\], got \[3\] of torch.float32"):
        encoder(vectors[:3], torch.tensor([0, 3]), times[:3], times[:3].float())
    missing = times[:3].clone()
    missing[1] = -(2**63)
    with pytest.raises(
        ValueError, match=r"times must be between −2\*\*62 and 2\*\*62, got -9223372036854775808, which is NaT"
    ):
        encoder(vectors[:3], torch.tensor([0, 3]), missing)
    for kind in KINDS:
        encoder = SequenceEncoder(kind, DIM, 1, HEADS, LONGEST).double()
        for offsets in (torch.tensor([0, 2]), torch.tensor([0, 4]), torch.tensor([0, 2, 1, 3])):
            with pytest.raises(ValueError, match="offsets must ascend from 0 to the 3 events, got"):
                encoder(vectors[:3], offsets, times[:3])
        with pytest.raises(ValueError, match=r"offsets must be int64 \[B \+ 1\], got \[2\] of torch.int32"):
            encoder(vectors[:3], torch.tensor([0, 3], dtype=torch.int32), times[:3])
