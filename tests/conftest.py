"""What all tests share."""

import importlib.metadata
import os
import types

import pytest
import torch

from seqarch import discovery

pytest_plugins = ["tests.data.fixtures"]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers are the parallelism


@pytest.fixture
def installed(monkeypatch):
    """Pretend that exactly these (distribution, entry point, value) are installed."""

    def install(*entries):
        points = []
        for distribution, name, value in entries:
            point = importlib.metadata.EntryPoint(name, value, discovery.GROUP)
            dist = types.SimpleNamespace(name=distribution, version="1.0")
            points.append(point._for(dist))
        monkeypatch.setattr(discovery, "entry_points", lambda group: points)
        discovery.plugins.cache_clear()

    yield install
    discovery.plugins.cache_clear()
