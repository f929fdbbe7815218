"""AR and generation workers on a CPU: vLLM's CPU worker that runs vLLM-Omni's model runners."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.worker.cpu_model_runner import CPUModelRunner, _set_torch_accelerator_to_noop, _torch_cuda_wrapper
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm_omni.worker.gpu_ar_model_runner import GPUARModelRunner
from vllm_omni.worker.gpu_generation_model_runner import GPUGenerationModelRunner
from vllm_omni.worker.mixins import OmniWorkerMixin

from omniqueue.platforms.cpu import plain_cache

#: Tokens in the one forward pass at warm-up.
_WARM_UP_TOKENS = 16

if not torch.cuda.is_available():
    # Models ask in every forward pass; a torch without CUDA raises instead of saying no.
    torch.cuda.is_current_stream_capturing = lambda: False


class _CpuRunnerMixin:
    """Builds a GPU model runner with CUDA's streams and events replaced, then points its device buffers at the host's.

    ``CPUModelRunner`` does both around its own constructor, but the omni runners' constructors add buffers of theirs.
    """

    compilation_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _set_torch_accelerator_to_noop()
        with _torch_cuda_wrapper():
            super().__init__(*args, **kwargs)
        self._postprocess_tensors()

    def _init_device_properties(self) -> None:
        """A CPU has none that a runner needs."""

    def _sync_device(self) -> None:
        """Nothing to wait for."""

    def _init_talker_mtp(self) -> None:
        # Where no graph is captured the largest has no size, and the base class takes that for a number.
        self.compilation_config.max_cudagraph_capture_size = self.compilation_config.max_cudagraph_capture_size or 0
        super()._init_talker_mtp()  # type: ignore[misc]
        self._postprocess_tensors()

    def _postprocess_tensors(self) -> None:
        super()._postprocess_tensors()  # type: ignore[misc]


class CpuARModelRunner(_CpuRunnerMixin, GPUARModelRunner, CPUModelRunner):
    """Autoregressive stages."""

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        if self.kv_transfer_manager.config.need_send_cache:
            plain_cache.keep(self.compilation_config.static_forward_context, self.kv_transfer_manager)


class CpuGenerationModelRunner(_CpuRunnerMixin, GPUGenerationModelRunner, CPUModelRunner):
    """Non-autoregressive stages, such as codes to a waveform."""


class _CpuOmniWorker(OmniWorkerMixin, CPUWorker):
    model_runner_cls: ClassVar[type[Any]]

    def init_device(self) -> None:
        # vLLM's second model runner has no omni hooks.
        self.use_v2_model_runner = False
        super().init_device()
        self.model_runner = self.model_runner_cls(self.vllm_config, torch.device("cpu"))

    def compile_or_warm_up_model(self) -> Any:
        # Some models set state in their first forward pass (the voice of Qwen2.5-Omni's talker), and vLLM's CPU worker
        # skips its warm-up for eager models. The base class resets the seed after this.
        if not self._should_warm_up_model():
            self.model_runner._dummy_run(_WARM_UP_TOKENS, is_profile=True)
        return super().compile_or_warm_up_model()


class CpuARWorker(_CpuOmniWorker):
    """Worker of an autoregressive stage."""

    model_runner_cls = CpuARModelRunner


class CpuGenerationWorker(_CpuOmniWorker):
    """Worker of a generation stage."""

    model_runner_cls = CpuGenerationModelRunner
