"""vLLM worker that installs sampling by the law after loading the model, before graph capture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from vllm.platforms import current_platform

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as VllmWorker
else:
    from vllm.v1.worker.gpu_worker import Worker as VllmWorker


def process_shared_weights(model: torch.nn.Module) -> None:
    """Process shared weights (such as a tied head) again, because vLLM's reload updates only one of the modules."""
    owners: dict[int, list[Any]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        for module in modules if len(modules) > 1 else ():
            if hasattr(module, "quant_method"):
                module.quant_method.process_weights_after_loading(module)


class LawWorker(VllmWorker):  # type: ignore[misc]
    def load_model(self, **options: Any) -> None:
        super().load_model(**options)
        if self.use_v2_model_runner:
            from rlhfspec.engine.vllm.inside import law_v2 as law
        else:
            from rlhfspec.engine.vllm.inside import law_v1 as law  # type: ignore[no-redef]
        self.law = law.install(self.model_runner)
        self._names = {name for name, _ in self.model_runner.get_model().named_parameters()}

    def watch(self) -> None:
        self.law.witness.is_watching = True

    def judge(self) -> list[str]:
        witness = self.law.witness
        problems = witness.problems() if witness.rows else ["no token was drawn by the sampling rule"]
        witness.is_watching, witness.rows = False, []
        return problems

    def first_logits(self) -> list[float]:
        return self.law.witness.rows[0][0].tolist()  # type: ignore[no-any-return]

    def load_version(self, path: str) -> list[str]:
        """Load weights by checkpoint names. Return the names of model weights that were missing."""
        model, loaded = self.model_runner.get_model(), set[str]()
        load = model.load_weights

        def noting(weights: Any) -> Any:
            found = load(weights)
            loaded.update(found or self._names)
            return found

        model.load_weights = noting
        try:
            with torch.inference_mode():
                self.reload_weights(weights_iterator=iter(load_file(Path(path)).items()), is_checkpoint_format=True)
        finally:
            del model.load_weights
        process_shared_weights(model)
        return sorted(self._names - loaded) if self.vllm_config.model_config.quantization is None else []
