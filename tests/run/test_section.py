"""Keys that a class of the library has, too, have its defaults."""

from inspect import Parameter, signature

import pytest

from rowmesh.checkpoint.writer import Rules
from rowmesh.models.sequence import SequenceEncoder
from rowmesh.pipeline import Pipeline
from rowmesh.placement.request import Request
from rowmesh.publish import Publisher
from rowmesh.run.config import CheckpointConfig, PipelineConfig, PlacementConfig, PublishConfig, TiersConfig
from rowmesh.run.section import shared
from rowmesh.run.sequence.options import SequenceOptions
from rowmesh.tables import Tiers


@pytest.mark.parametrize(
    ("section", "kind", "own"),
    [
        (TiersConfig, Tiers, {"folder"}),  # a text
        (PipelineConfig, Pipeline, {"depth"}),  # a run has no pipeline, where none is asked for
        (PlacementConfig, Request, set()),
        (CheckpointConfig, Rules, {"copy_bytes"}),  # auto
        (PublishConfig, Publisher, set()),
        (SequenceOptions, SequenceEncoder, {"dropout"}),  # as published
    ],
)
def test_defaults_are_those_of_the_library(section, kind, own):
    parameters, keys = signature(kind).parameters, section.model_fields
    names = [name for name in keys if name in parameters and parameters[name].default is not Parameter.empty]
    assert {name for name in names if keys[name].default != parameters[name].default} == own
    assert shared(section(), kind).keys() == parameters.keys() & keys.keys()
