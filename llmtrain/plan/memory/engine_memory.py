"""Activations, and what comes and goes, on a rank of this engine: its schedule's fullest moment, played on a
ledger of bytes.

`held` is what is there before that backward pass, `working` what the pass needs beyond it. A twin of
`engine/model/stage.py`, `engine/parallel/buckets.py` and `gathering.py`, held against them by
`plan --verify`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmtrain.config.layout import Layout
from llmtrain.plan.machine import Machine
from llmtrain.plan.memory.bucket_packing import BUCKETS_AT_ONCE, Packing, default_bucket_bytes
from llmtrain.plan.memory.engine_block import BlockBytes, Ledger, block_bytes
from llmtrain.plan.memory.engine_gradients import Gradients, pack_sites
from llmtrain.plan.memory.rank_parameters import rank_parameters, vocabulary_rows
from llmtrain.plan.model_size import position_parameters
from llmtrain.plan.timing.schedules import waiting_buffers
from llmtrain.plan.timing.timeline import fullest_runs
from llmtrain.plan.workload import Workload


def is_own_engine(work: Workload, layout: Layout, machine: Machine) -> bool:
    """Whether this engine runs it: its tensors are known one by one."""
    software = machine.software
    fused = software.attention != "unfused" and not software.dropout
    return software.framework == "llmtrain" and fused and work.shape.experts == layout.ep == layout.cp == 1


class EngineMemory:
    """Memory of one workload on this engine; what layouts have in common is remembered."""

    def __init__(self, work: Workload, machine: Machine) -> None:
        self._work = work
        self.bucket = int(work.bucket or default_bucket_bytes(on_cpu=machine.is_cpu))
        self._blocks: dict[tuple[object, ...], _Block] = {}

    def stage(self, layout: Layout, stage: int, micro_batches: int) -> tuple[float, float]:
        """Bytes held and working on a rank of one stage."""
        return _Rank(self._work, layout, stage, self.bucket, self._block(layout)).fullest(micro_batches)

    def sizes(self, layout: Layout) -> BlockBytes:
        """Of one block."""
        return self._block(layout).sizes

    def _block(self, layout: Layout) -> _Block:
        puts_off = layout.schedule == "zero-bubble" and layout.pp > 1
        shape = (layout.tp, layout.micro_batch, layout.sequence_parallel)
        key = (*shape, layout.recompute, layout.zero >= 3, puts_off)
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = _Block(block_bytes(self._work, layout))
        return block


class _Block:
    """A block, and what its backward pass comes to where no gradients are given back in it."""

    def __init__(self, sizes: BlockBytes) -> None:
        self.sizes = sizes
        self._moves = {lent: self._play(lent=lent) for lent in (False, True)}

    def _play(self, *, lent: bool) -> Ledger:
        ledger = Ledger()
        self.sizes.backward(ledger, ledger.touch, lent=lent)
        return ledger

    def backward(self, ledger: Ledger, *, lent: bool) -> None:
        """The backward pass, weight gradients and all."""
        moves = self._moves[lent]
        ledger.touch(moves.peak)
        ledger.now += moves.now


class _Rank:
    """A rank of one pipeline stage under one layout."""

    def __init__(self, work: Workload, layout: Layout, stage: int, bucket: int, block: _Block) -> None:
        self._work, self._layout, self._stage, self._bucket = work, layout, stage, bucket
        self._block, self._played = block.sizes, block
        self._counts = work.chunk_layers(layout)
        self._last = len(self._counts) - 1
        element, self._tokens = work.activation_bytes, layout.micro_batch * work.sequence
        rows = vocabulary_rows(work.model.vocab, layout.tp, 0)[1]
        self._vocabulary = float(rows * work.shape.hidden)
        self._logits = float(element * rows * self._tokens)
        """Their gradient is as large, and is made in the forward pass."""
        self._at_loss = self._logits * (6 if element < 4 else 2)
        """Logits, the softmax and its copy in FP32, the gradient."""
        self._releases = layout.zero >= 2 and layout.dp > 1
        self._gathers = layout.zero >= 3 and layout.dp > 1
        matrices = (self._block.down, self._block.into, self._block.out, self._block.qkv)
        self._resident = sum(matrices) if self._gathers else 0.0
        """Gathered weights of a block."""
        self._is_shared = work.tied and self._last > 0
        """Whether embedding and head are copies on two stages."""
        self._early_chunks: set[int] = set()
        self._head_weights = self._vocabulary * element if self._gathers else 0.0

    def fullest(self, micro_batches: int) -> tuple[float, float]:
        """Bytes held before the fullest backward pass, and in it on top of them."""
        layout, stage = self._layout, self._stage
        ledger = Ledger()
        ledger.take(waiting_buffers(layout.schedule, layout.pp, layout.vpp, stage) * self._block.own)
        held = 0.0
        for work, chunk, count in fullest_runs(layout.schedule, layout.pp, layout.vpp, micro_batches, stage):
            if work == "forward":
                self._forward(ledger, chunk, count)
            elif work == "backward":
                for _ in range(count):
                    held = ledger.now
                    self._backward(ledger, chunk)
            else:
                self._weight_gradients(ledger, chunk)
        return held, ledger.peak - held

    # ---- forward -----------------------------------------------------------------------------------------
    def _forward(self, ledger: Ledger, chunk: int, count: int) -> None:
        ledger.take(count * self._kept(chunk))
        if chunk == self._last:
            ledger.take((count - 1) * self._logits)
            gathered = self._block.whole if self._block.gathers else 0.0
            ledger.touch(self._head_weights + max(gathered + self._logits, self._at_loss))
            ledger.take(self._logits)

    def _kept(self, chunk: int) -> float:
        """Bytes kept of one micro-batch, without those of the loss."""
        block, work = self._block, self._work
        kept = self._counts[chunk] * block.kept() + block.own  # what the last block hands on
        if chunk == 0:
            kept += self._tokens * (8 if self._layout.tp == 1 else 9)
        if chunk == self._last:
            kept += block.statistics + block.own + self._tokens
        if work.packs_documents:
            kept += 4.0 * self._tokens * work.shape.head_dim if block.is_rotated else 0.0
            kept += self._tokens * work.sequence if block.recompute == "full" else 0.0
        return kept

    # ---- backward ----------------------------------------------------------------------------------------
    def _backward(self, ledger: Ledger, chunk: int) -> None:
        block, at_end = self._block, 0.0
        if block.puts_off and self._releases and chunk not in self._early_chunks:
            self._early_chunks.add(chunk)
            ledger.take(sum(self._early_and_late(chunk)[0]))
            at_end = self._early_and_late(chunk)[1]
        before = ledger.now
        arrive: Callable[[float], None] = ledger.touch
        gradients: Gradients | None = None
        if self._releases and not block.puts_off:
            gradients = Gradients(ledger, self._buckets(chunk), self._layout.dp)
            arrive = gradients.arrive
        in_blocks = _nothing if block.puts_off else arrive
        ledger.take(self._resident)  # of the last block, fetched for it or beside the head
        if chunk == self._last:
            self._head(ledger, in_blocks)
        else:
            ledger.take(block.own)  # the gradient that was received
        for index in self._worth_a_look(ledger, self._counts[chunk], gradients):
            ledger.take(self._resident if index else 0.0)
            lent = index == self._counts[chunk] - 1 and chunk < self._last
            if gradients is not None:
                block.backward(ledger, arrive, lent=lent)
            else:
                self._played.backward(ledger, lent=lent)
            ledger.free(self._resident)
        if chunk == 0:
            self._embedding(ledger, arrive)
        ledger.take(at_end)
        ledger.now = before + at_end - self._kept(chunk) - (self._logits if chunk == self._last else 0.0)
        if block.puts_off:
            ledger.take(self._put_off(chunk))

    def _head(self, ledger: Ledger, arrive: Callable[[float], None]) -> None:
        block, weight = self._block, self._vocabulary * self._work.activation_bytes
        ledger.take(self._head_weights)
        if block.gathers:
            ledger.touch(2 * block.whole + block.own + (0.0 if block.puts_off else weight))
            ledger.take(block.own)
        else:
            ledger.touch(block.whole + (0.0 if block.puts_off else weight))
            ledger.take(block.whole)
        if block.puts_off:
            ledger.take(block.whole if block.gathers else 0.0)
        else:
            ledger.free(self._logits + block.own)
        if self._is_shared and self._releases and not block.puts_off:  # reduced after all others
            ledger.take(4.0 * self._vocabulary)
            ledger.touch(weight)
        elif self._work.tied and not self._is_shared:  # waits for the embedding's
            ledger.take(weight)
        else:
            arrive(weight)
        ledger.free(self._head_weights)
        block.norm(ledger)
        ledger.take(block.own)  # there was no residual stream to add to

    def _worth_a_look(self, ledger: Ledger, layers: int, gradients: Gradients | None) -> Iterator[int]:
        """Blocks of a chunk, from the last one, that may be the fullest moment: kept activations only become
        fewer, gradients and what is put off more."""
        if gradients is not None:
            index = layers - 1
            while index >= 0:
                before = gradients.mark()
                yield index
                index -= 1 + (gradients.pass_over(before, index - 1) if index < layers - 1 else 0)
            return
        if self._releases:
            yield from reversed(range(layers))
            return
        start = ledger.now
        yield layers - 1
        if layers > 1 and self._block.puts_off:
            ledger.now += (layers - 2) * (ledger.now - start)
            yield 0
        else:
            ledger.now -= (layers - 1) * self._block.kept()

    def _embedding(self, ledger: Ledger, arrive: Callable[[float], None]) -> None:
        block, layout, element = self._block, self._layout, self._work.activation_bytes
        weight, positions = self._vocabulary * element, position_parameters(self._work.model) * element
        ledger.touch(positions)
        if self._plain_positions:
            arrive(positions)
        copies = block.whole * ((layout.tp > 1) + block.gathers)
        ledger.touch(copies + weight)
        if self._is_shared and self._releases and not block.puts_off:
            ledger.take(4.0 * self._vocabulary)
            ledger.touch(weight)
        else:
            arrive(weight)

    # ---- weight gradients --------------------------------------------------------------------------------
    def _put_off(self, chunk: int) -> float:
        """Bytes that wait for the weight gradients of one micro-batch."""
        ends = self._logits + self._block.whole if chunk == self._last else 0.0
        return self._counts[chunk] * self._block.put_off + ends

    def _weight_gradients(self, ledger: Ledger, chunk: int) -> None:
        block = self._block
        weights = [block.down, block.into, block.out, block.qkv] * self._counts[chunk]
        if chunk == self._last:
            weights.insert(0, self._vocabulary * self._work.activation_bytes)
        if self._releases:
            early, _, late = self._early_and_late(chunk)
            arrive = Gradients(ledger, late, self._layout.dp).arrive
            for weight in weights:
                arrive(weight)
            # Of buckets that hold more than one micro-batch's gradients, some travel while they fill again.
            sizes = sorted(early)[1 - BUCKETS_AT_ONCE :]
            ledger.touch(sum(sizes) * ((self._stage > 0) + 1.0 / self._layout.dp))
        else:
            ledger.touch(max(weights))
        ledger.free(self._put_off(chunk))

    def _buckets(self, chunk: int) -> list[tuple[int, float]]:
        """The buckets of a chunk whose gradients come in every micro-batch, and are given back."""
        sites = [self._block.gradients()] * self._counts[chunk]
        if chunk == self._last and (self._last > 0 or not self._work.tied) and not self._is_shared:
            sites.insert(0, [self._vocabulary])
        if chunk == 0:
            positions = [float(position_parameters(self._work.model))] if self._plain_positions else []
            sites.append(positions if self._is_shared else [*positions, self._vocabulary])
        return pack_sites(sites, self._bucket, by_site=self._layout.zero >= 3)

    @property
    def _plain_positions(self) -> bool:
        return bool(position_parameters(self._work.model)) and not self._block.gathers

    def _early_and_late(self, chunk: int) -> tuple[list[float], float, list[tuple[int, float]]]:
        """Where weight gradients are put off: bytes of a chunk's buckets that norms and biases go to as well,
        bytes of those that only the embedding does, and the buckets that nothing else goes to. Norms, biases
        and the embedding put nothing off, and with their first gradient the whole bucket is there."""
        layout = self._layout
        shapes = rank_parameters(self._work, layout, stage=self._stage, tp_index=0)
        early: list[float] = []
        at_end, late = 0.0, []
        for bucket in Packing(layout.zero, self._bucket).pack(shapes):
            members = [shapes[index] for index in bucket.members]
            if not bucket.releases or bucket.chunk != chunk // layout.pp:
                continue
            size = 4.0 * sum(member.numel for member in members)
            if any(member.is_vector for member in members):
                early.append(size)
            elif chunk == 0 and any(not member.site for member in members):
                at_end += size
            else:
                late.append((len(members), size))
        return early, at_end, late


def _nothing(_: float) -> None:
    """Weight gradients that come later."""
