"""Random states: what follows is what would have followed."""

import json
import random

import numpy as np
import torch

from rowmesh._support.random_states import random_states, set_random_states

CPU = torch.device("cpu")


def draw():
    return torch.rand(3).tolist(), np.random.normal(size=3).tolist(), random.random(), random.gauss(0, 1)


def test_random_numbers_go_on_as_they_would_have():
    draw()
    states = json.loads(json.dumps(random_states(CPU)))  # as ranks send them
    expected = draw()
    assert draw() != expected
    set_random_states(states, CPU)
    assert draw() == expected
