"""vLLM's tiering on its CPU platform, where its own worker refuses to run: the copies are plain ones.

The product has no use for this: on a GPU vLLM's own worker copies between device and primary tier. Everything
else, scheduler half, primary tier and secondary tiers, is vLLM's.
"""

from __future__ import annotations

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CopyingWorker(OffloadingWorker):
    """Copies pages between the engine's cache and the rows of the primary tier, at once."""

    def __init__(self, caches, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._caches, self._blocks_per_chunk, self._region = caches, blocks_per_chunk, region
        self._engine = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in caches.tensors]
        self._rows = [
            region.create_next_worker_view(t.page_size_bytes * blocks_per_chunk) for t in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def _pages(self, blocks, chunks):
        """Yield (group, engine block, chunk, place of the block in the chunk)."""
        at = chunk_at = 0
        for group, (count, first) in enumerate(zip(blocks.group_sizes, blocks.block_indices, strict=True)):
            if not count:
                continue
            skipped = first % self._blocks_per_chunk
            for place in range(skipped, skipped + count):
                chunk, within = divmod(place, self._blocks_per_chunk)
                block = int(blocks.block_ids[at + place - skipped])
                yield group, block, int(chunks.block_ids[chunk_at + chunk]), within
            at += count
            chunk_at += -(-(skipped + count) // self._blocks_per_chunk)

    def _copy(self, job_id: int, blocks, chunks, *, store: bool) -> bool:
        nbytes = 0
        for group, block, chunk, within in self._pages(blocks, chunks):
            for ref in self._caches.group_data_refs[group]:
                size = self._caches.tensors[ref.tensor_idx].page_size_bytes
                row = self._rows[ref.tensor_idx][chunk, within * size : (within + 1) * size]
                page = self._engine[ref.tensor_idx][block]
                if store:
                    row.copy_(page)
                else:
                    page.copy_(row)
                nbytes += ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, nbytes, 0.0))
        return True

    def submit_store(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id, src_spec, dst_spec) -> bool:
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def get_finished(self):
        done, self._done = self._done, []
        return done

    def wait(self, job_ids) -> None:
        """Every copy is done when it was asked for."""

    def shutdown(self) -> None:
        self._rows.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's tiering with `CopyingWorker`."""

    def get_worker(self, kv_caches) -> CopyingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
