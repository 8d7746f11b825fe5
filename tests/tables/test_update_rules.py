"""Update rules as values; their arithmetic is tested in tests/ops/test_merge_update.py."""

import re
from functools import partial

import pytest

from rowmesh.errors import ConfigurationError
from rowmesh.tables.update_rules import RULES, SGD, AdaGrad, Adam, RowWiseAdaGrad


def test_rules_by_name():
    assert list(RULES.values()) == [SGD, AdaGrad, RowWiseAdaGrad, Adam]
    assert all(rule.name == name for name, rule in RULES.items())


def test_what_kernels_are_told():
    assert SGD().hyperparameters == (0.0, 0.0, 0.0)
    assert AdaGrad(eps=0.5).hyperparameters == (0.5, 0.0, 0.0)
    assert Adam(beta1=0.5, beta2=0.25, eps=0.1).hyperparameters == (0.1, 0.5, 0.25)
    assert RowWiseAdaGrad(initial_accumulator=2.0).initial_state == {"sum": 2.0}
    assert Adam().initial_state == {"m": 0.0, "v": 0.0}
    assert [rule().root_factor for rule in RULES.values()] == [1.0] * 4
    assert [rule(moment_scale=4).root_factor for rule in (AdaGrad, RowWiseAdaGrad, Adam)] == [0.5] * 3


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: SGD(lr=-1.0), "sgd: lr must be 0 or more and finite, got -1"),
        (lambda: SGD(lr=float("nan")), "sgd: lr must be 0 or more and finite, got nan"),
        (lambda: SGD(lr=float("inf")), "sgd: lr must be 0 or more and finite, got inf"),
        (lambda: AdaGrad(eps=-1e-9), "adagrad: eps must be 0 or more and finite, got -1e-09"),
        (lambda: RowWiseAdaGrad(eps=float("nan")), "row_wise_adagrad: eps must be 0 or more and finite, got nan"),
        (
            lambda: AdaGrad(initial_accumulator=-1.0),
            "adagrad: initial_accumulator must be 0 or more and finite, got -1",
        ),
        (lambda: RowWiseAdaGrad(initial_accumulator=float("inf")), "initial_accumulator must be .*, got inf"),
        (lambda: Adam(eps=float("nan")), "adam: eps must be 0 or more and finite, got nan"),
        (lambda: Adam(beta1=float("nan")), r"adam: beta1 must be in \[0, 1\), got nan"),
        (lambda: Adam(beta1=1.0), r"adam: beta1 must be in \[0, 1\), got 1"),
        (lambda: Adam(beta2=-0.1), r"adam: beta2 must be in \[0, 1\), got -0.1"),
        *[
            (
                partial(rule, moment_scale=bad),
                f"{rule.name}: moment_scale must be above 0 and finite .*, got {re.escape(str(bad))}; 1 is",
            )
            for rule in (AdaGrad, RowWiseAdaGrad, Adam)
            for bad in (0.0, -1.0, float("nan"), float("inf"), 1e-31, 1e31)
        ],
    ],
)
def test_refuses(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
