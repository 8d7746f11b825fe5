"""SequenceOptions: what `model.options` of a sequence model may say, with published defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationError, model_validator

from rowmesh._support.suggest import hint
from rowmesh.models.sequence.encoder import Scale, SequenceEncoder
from rowmesh.run.section import Factor, Positive, Section, default_of

LossName = Literal["full_softmax", "sampled_softmax", "binary_cross_entropy"]
SHARED_NEGATIVES = 128  # of HSTU's sampled softmax
OWN_NEGATIVES = 1  # of SASRec's binary cross entropy


class SequenceOptions(Section):
    """The encoder, the loss and the evaluation of a sequence model.

    Attributes:
        num_blocks, num_heads, max_length, dropout, scale, request_time, ffn_dim, time, time_unit, learned_positions: of
            `rowmesh.models.sequence.SequenceEncoder`, which takes the latest `max_length` events of a user, and counts
            `time_unit` in seconds.
        item_ids: what ids of a dynamic table are: the numbers of the prepared items, or ids that mean the same in all
            data ("raw"): integers as they are, and the hash of text.
        side: side columns of the data whose vectors are added to those of items; all that they have if not given.
        loss: over all items; over the target and sampled ones; or of each of these for itself.
        negatives: sampled items; 128 of sampled_softmax, 1 a position of binary_cross_entropy if not given.
        shared_negatives: whether all positions of a step share them; of sampled_softmax if not given.
        draw: with which probability items are sampled: the same for all, or by their training events.
        log_q: whether the scores of sampled items are corrected for it; of sampled_softmax.
        cosine: whether both sides are divided by their norms; of sampled_softmax if not given.
        temperature: what cosines are divided by.
        seen: whether items of a user's history are ranked in evaluations.
        ties: where the target stands among items of the same score.
    """

    num_blocks: Positive = 2
    num_heads: Positive = 1
    max_length: Positive = 50
    dropout: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.2
    scale: Scale = default_of(SequenceEncoder, "scale")
    request_time: bool = default_of(SequenceEncoder, "request_time")
    ffn_dim: Positive | None = default_of(SequenceEncoder, "ffn_dim")
    time: Literal["power", "exponential"] | None = default_of(SequenceEncoder, "time")
    time_unit: Factor | None = default_of(SequenceEncoder, "time_unit")
    item_ids: Literal["prepared", "raw"] = "prepared"
    side: list[str] | None = None
    learned_positions: bool | None = default_of(SequenceEncoder, "learned_positions")
    loss: LossName = "full_softmax"
    negatives: Positive | None = None
    shared_negatives: bool | None = None
    draw: Literal["uniform", "popularity"] = "uniform"
    log_q: bool = False
    cosine: bool | None = None
    temperature: Factor = 0.05
    seen: Literal["remove", "keep"] = "remove"
    ties: Literal["worst", "middle", "best"] = "worst"

    @staticmethod
    def parse(options: Mapping[str, object]) -> SequenceOptions:
        """From `model.options`.

        Raises:
            ValueError: names the key and what is wrong with it.

        >>> SequenceOptions.parse({"loss": "sampled_softmax"}).num_negatives
        128
        """
        try:
            return SequenceOptions.model_validate(dict(options))
        except ValidationError as error:
            raise ValueError("; ".join(map(_explain, error.errors()))) from None

    @property
    def samples(self) -> bool:
        """Whether the loss is over sampled items."""
        return self.loss != "full_softmax"

    @property
    def shares(self) -> bool:
        """Whether all positions have the same negatives."""
        return self.loss == "sampled_softmax" if self.shared_negatives is None else self.shared_negatives

    @property
    def num_negatives(self) -> int:
        """Sampled items, of a step or of each position."""
        return self.negatives or (SHARED_NEGATIVES if self.loss == "sampled_softmax" else OWN_NEGATIVES)

    @property
    def is_cosine(self) -> bool:
        """Whether both sides are divided by their norms."""
        return self.loss == "sampled_softmax" if self.cosine is None else self.cosine

    @model_validator(mode="after")
    def _fit(self) -> Self:
        if not self.samples:
            given = [key for key in ("negatives", "shared_negatives") if getattr(self, key) is not None]
            given += ["draw"] if self.draw != "uniform" else []
            if given:
                raise ValueError(f"{given[0]} is for sampled items, and full_softmax takes all; give another loss")
        if self.log_q and self.loss != "sampled_softmax":
            raise ValueError(f"log_q is for sampled_softmax, and loss is {self.loss}; leave it out")
        return self


def _explain(detail: object) -> str:
    assert isinstance(detail, dict)
    key, message = ".".join(map(str, detail["loc"])), str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        known = SequenceOptions.model_fields
        return f"options.{key}: no such option of a sequence model{hint(key, known)}; known: {', '.join(known)}"
    return f"options.{key}: {message}, got {detail['input']!r}" if key else f"options: {message}"
