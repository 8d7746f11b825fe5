"""TorchRec's EmbeddingBagConfig and EmbeddingConfig as tables: what is carried over, and what is refused."""

import functools
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import pytest
import torch

from rowmesh.errors import ConfigurationError
from rowmesh.tables import Constant, Normal, TableSpec, Uniform, fuse


class PoolingType(Enum):
    MEAN = "MEAN"


class DataType(Enum):
    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"


@dataclass
class EmbeddingConfig:
    """As much of TorchRec's as rowmesh reads; fills `init_fn` as TorchRec does."""

    name: str = "t"
    num_embeddings: int = 9
    embedding_dim: int = 4
    feature_names: list[str] = field(default_factory=lambda: ["a", "b"])
    data_type: DataType = DataType.FP32
    init_fn: Any = None
    need_pos: bool = False
    use_virtual_table: bool = False

    def __post_init__(self):
        if self.init_fn is None:
            bound = (1 / self.num_embeddings) ** 0.5
            self.init_fn = functools.partial(torch.nn.init.uniform_, a=-bound, b=bound)


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    pooling: PoolingType = PoolingType.MEAN


def table(**options):
    changes = options.pop("changes", {})
    return TableSpec.from_embedding_bag_config(EmbeddingBagConfig(**options), **changes)


def test_what_is_carried_over():
    assert table(changes={"dtype": torch.bfloat16}) == TableSpec(
        name="t", num_rows=9, dim=4, features=("a", "b"), pooling="mean", dtype=torch.bfloat16
    )
    assert table(data_type=DataType.BF16).dtype == torch.bfloat16


def test_configs_without_pooling_give_one_vector_an_id():
    spec = TableSpec.from_embedding_config(EmbeddingConfig(), dtype=torch.float64)
    assert spec == TableSpec(name="t", num_rows=9, dim=4, features=("a", "b"), pooling="none", dtype=torch.float64)


def test_a_config_of_the_other_kind_is_refused_but_for_pooling_that_is_given():
    with pytest.raises(
        ConfigurationError, match=r"'t': the config has no pooling, .* by from_embedding_config, or pass"
    ):
        TableSpec.from_embedding_bag_config(EmbeddingConfig())
    with pytest.raises(ConfigurationError, match=r"pooling PoolingType.MEAN.* by from_embedding_bag_config, or pass"):
        TableSpec.from_embedding_config(EmbeddingBagConfig())
    assert TableSpec.from_embedding_bag_config(EmbeddingConfig(), pooling="sum").pooling == "sum"
    assert TableSpec.from_embedding_config(EmbeddingBagConfig(), pooling="none").pooling == "none"


def test_tables_of_different_sizes_still_fuse():
    assert len(fuse([table(), table(name="u", num_embeddings=1_000_003, feature_names=["c"])])) == 1


@pytest.mark.parametrize(
    "init_fn, initializer",
    [
        (functools.partial(torch.nn.init.uniform_, a=-0.5, b=0.5), Uniform(bound=0.5)),
        (functools.partial(torch.nn.init.normal_, std=0.25), Normal(std=0.25)),
        (torch.nn.init.normal_, Normal(std=1.0)),
        (functools.partial(torch.nn.init.constant_, val=2.0), Constant(value=2.0)),
        (torch.nn.init.zeros_, Constant()),
    ],
)
def test_initial_values_are_carried_over(init_fn, initializer):
    assert table(init_fn=init_fn).initializer == initializer


@pytest.mark.parametrize(
    "init_fn",
    [torch.nn.init.xavier_uniform_, functools.partial(torch.nn.init.uniform_, a=0.0, b=1.0), torch.nn.init.uniform_],
)
def test_other_initial_values_are_refused(init_fn):
    with pytest.raises(ConfigurationError, match=r"table 't': .* which init_fn .* is not; pass initializer="):
        table(init_fn=init_fn)
    assert table(init_fn=init_fn, changes={"initializer": Constant()}).initializer == Constant()


def test_what_has_no_equal_is_refused():
    with pytest.raises(ConfigurationError, match=r"table 't': rows of data_type FP16 .* pass dtype="):
        table(data_type=DataType.FP16)
    assert table(data_type=DataType.FP16, changes={"dtype": torch.float32}).dtype == torch.float32
    with pytest.raises(ConfigurationError, match="table 't': use_virtual_table = True has no equal"):
        table(use_virtual_table=True)
    assert table(need_pos=True) == table()
    with pytest.raises(ConfigurationError, match="'t' has no features"):
        table(feature_names=[])
