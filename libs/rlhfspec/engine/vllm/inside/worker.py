"""vLLM's worker, in each of its ranks: the law goes in as soon as the model is loaded, before anything is captured."""

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
        problems = witness.problems() if witness.rows else ["nothing was sampled by the law"]
        witness.is_watching, witness.rows = False, []
        return problems

    def first_logits(self) -> list[float]:
        """Of what the witness saw first."""
        return self.law.witness.rows[0][0].tolist()  # type: ignore[no-any-return]

    def load_version(self, path: str) -> list[str]:
        """Weights by the names of the checkpoint. Return what of the model was not among them."""
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
        return sorted(self._names - loaded) if self.vllm_config.model_config.quantization is None else []
