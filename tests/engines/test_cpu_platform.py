"""When the CPU platform offers itself, and what the import hook does to which packages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from omniqueue.platforms import cpu

#: The shape of torchaudio's loader, torchvision's and torchcodec's, with libraries that load or not.
PACKAGES = {
    "torchaudio/_extension/utils.py": (
        "def _load_lib(name):\n    if {broken}: raise OSError('no libcudart')\n    return True\n"
    ),
    "torchaudio/_extension/__init__.py": "from .utils import _load_lib\nLOADED = _load_lib('_torchaudio')\n",
    "torchaudio/__init__.py": "from ._extension import LOADED\n",
    "torchcodec/_internally_replaced_utils.py": (
        "def load_image_library():\n    if {broken}: raise OSError('no libcudart')\n"
    ),
    "torchcodec/__init__.py": "from ._internally_replaced_utils import load_image_library\nload_image_library()\n",
    "torchvision/extension.py": "import torch\n",
    "torchvision/__init__.py": "from . import extension\n",
    "torch/__init__.py": (
        "class _Ops:\n    torchvision = type('T', (), {fine})()\nops = _Ops()\ndefined = []\n"
        "class library:\n    class Library:\n        def __init__(self, name, kind): self.name = name\n"
        "        def define(self, schema): defined.append((self.name, schema))\n"
    ),
}


@pytest.mark.parametrize(
    ("on_cpu", "accelerator", "active"), [(True, False, True), (True, True, False), (False, False, False)]
)
def test_the_platform_is_for_cpu_builds_without_an_accelerator(
    monkeypatch: pytest.MonkeyPatch, on_cpu: bool, accelerator: bool, active: bool
) -> None:
    here = SimpleNamespace(is_cpu=lambda: on_cpu)
    torch = SimpleNamespace(accelerator=SimpleNamespace(is_available=lambda: accelerator))
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=here))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    path = cpu.platform_plugin()
    assert path == ("omniqueue.platforms.cpu.platform.CpuOmniPlatform" if active else None)


def run(folder: Path, broken: bool, code: str) -> subprocess.CompletedProcess[str]:
    for name, text in PACKAGES.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            text.replace("{broken}", str(broken)).replace("{fine}", "{}" if broken else "{'nms': 1, 'qnms': 1}")
        )
    start = (
        f"import sys; sys.path.insert(0, {str(folder)!r}); from omniqueue.platforms.cpu import torchvision_ops as t\n"
    )
    command = [sys.executable, "-c", start + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("package", ["torchaudio", "torchcodec"])
def test_a_library_that_does_not_load_breaks_an_import_without_the_hook(tmp_path: Path, package: str) -> None:
    assert "OSError: no libcudart" in run(tmp_path, True, f"import {package}").stderr


def test_with_the_hook_torchaudio_goes_without_its_library(tmp_path: Path) -> None:
    done = run(tmp_path, True, "t.plugin(); import torchaudio; print(torchaudio.LOADED)")
    assert (done.stdout, done.stderr) == ("False\n", "")


def test_with_the_hook_torchcodec_says_that_it_cannot_be_imported(tmp_path: Path) -> None:
    done = run(tmp_path, True, "t.plugin()\ntry: import torchcodec\nexcept ImportError as exc: print(exc)")
    assert "built for another torch" in done.stdout


def test_missing_operators_are_declared_once(tmp_path: Path) -> None:
    done = run(
        tmp_path, True, "t.plugin(); t.plugin(); import torchvision, torch; print(len(torch.defined), torch.defined)"
    )
    assert done.stdout.startswith("2 [('torchvision', 'nms(Tensor dets")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import torchaudio; print(torchaudio.LOADED)", "True\n"),
        ("import torchcodec; print('fine')", "fine\n"),
        ("import torchvision, torch; print(torch.defined)", "[]\n"),
    ],
)
def test_packages_that_match_torch_are_left_alone(tmp_path: Path, code: str, said: str) -> None:
    done = run(tmp_path, False, "t.plugin(); " + code)
    assert (done.stdout, done.stderr) == (said, "")


@pytest.mark.engine
def test_vllm_installs_the_hook_before_it_imports_torchvision() -> None:
    code = (
        "import vllm.platforms as p; p.current_platform\n"
        "import torchvision, torchaudio\n"
        "import sys; print([type(f).__module__ for f in sys.meta_path if 'omniqueue' in type(f).__module__])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert "omniqueue.platforms.cpu.torchvision_ops" in done.stdout


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_layers_take_what_is_not_in_their_precision_and_compute_no_float16() -> None:
    from omniqueue.engines import environment

    environment.prepare("")
    import torch

    from omniqueue.platforms.cpu.diffusion import compute_in_own_precision

    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 8).to(torch.bfloat16)
    given = torch.randn(2, 8)
    right = layer(given.to(torch.bfloat16))
    compute_in_own_precision(layer)
    with torch.autocast("cpu", dtype=torch.float16):
        half = layer(given)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = layer(given)
    for made in (layer(given), layer(given.to(torch.bfloat16)), half, mixed):
        assert made.dtype is torch.bfloat16
        assert torch.equal(made, right)


@pytest.mark.engine
def test_a_cache_that_is_handed_over_has_the_keys_and_values_in_their_places() -> None:
    import torch

    from omniqueue.platforms.cpu import plain_cache

    cache = torch.zeros(3, 2, 4, 10)  # blocks, heads, places, keys and values of 5 numbers each
    taken: list[list[torch.Tensor]] = []
    manager = SimpleNamespace(_extract_kv_cache=lambda *given: taken.append(given[3]))
    layer = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda *given: None))
    plain_cache.keep({"attention": layer, "other": SimpleNamespace()}, manager)
    key, value = torch.randn(4, 2, 5), torch.randn(4, 2, 5)
    layer.impl.do_kv_cache_update(layer, key, value, cache, torch.tensor([11, 4, -1, 0]))
    manager._extract_kv_cache("request", [2, 1, 0], 3, [cache])
    [[plain]] = taken
    for row, (block, place) in ((0, (2, 3)), (1, (1, 0)), (3, (0, 0))):
        assert torch.equal(plain[block, :, place], torch.cat([key[row], value[row]], dim=-1))
