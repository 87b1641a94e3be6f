"""The environment that vLLM must find when it is imported.

vLLM reads these once, at import or in the processes it spawns, so whoever starts a generator applies them to
``os.environ`` before ``generators.vllm_engine`` is imported.
"""

from __future__ import annotations

import os

from generators.config import GeneratorConfig


def vllm_environment(config: GeneratorConfig) -> dict[str, str]:
    """Variable -> value for a generator with this configuration."""
    environment = {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "slipstream",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.device == "cpu":
        environment["OMP_NUM_THREADS"] = str(config.threads)
        if config.tensor_parallel_size == 1:
            # The worker inside the core process: one process less, and no binding of every engine to core 0.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        else:
            # By hand: vLLM itself wants a NUMA node for each worker.
            cores = sorted(os.sched_getaffinity(0))[: config.tensor_parallel_size]
            environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores))
    return environment
