"""Weights that are on their way when a stage needs them: new ones after an optimizer step, which are waited
for at their first use, and those of ZeRO-3, which are gathered for every use.

ZeRO-3 gathers a site's buckets (a block's) before its forward pass and gives them back after it, and again
for the backward pass; the next site's are gathered meanwhile, so that two sites' weights are whole at a
time. The storage of a bucket's flat tensor is freed and allocated anew; its parameters, and what autograd
has saved of them, are views of it throughout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from llmtrain.engine.parallel.buckets import Bucket
from llmtrain.engine.parallel.groups import Pending
from llmtrain.engine.parallel.replicas import Chain


class _Resident:
    """A bucket whose parameters come and go."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self._arriving: Pending | None = None
        self._uses = 0

    def fetch(self) -> None:
        """Begin to gather the parameters, unless they are there or on their way."""
        if self._arriving is None:
            flat = self.bucket.parameters
            flat.untyped_storage().resize_(flat.numel() * flat.element_size())
            self._arriving = self.bucket.start_gathering()

    def hold(self) -> None:
        """Wait for the parameters, and keep them until `release`."""
        self.fetch()
        self._uses += 1
        if self._arriving is not None:
            self._arriving.wait()

    def release(self) -> None:
        """Give the parameters back when nobody else uses them."""
        self._uses -= 1
        if not self._uses:
            self._arriving = None
            self.bucket.parameters.untyped_storage().resize_(0)


class _BeforeBackward(torch.autograd.Function):
    """The identity behind a site: its backward pass comes first, and fetches the weights."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: GatheredWeights, site: int) -> Tensor:
        ctx.weights, ctx.site = weights, site
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weights.hold_for_backward(ctx.site)
        return gradients[0], None, None


class _AfterBackward(torch.autograd.Function):
    """The identity before a site: its backward pass comes last, and gives the weights back."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: GatheredWeights, site: int) -> Tensor:
        ctx.weights, ctx.site = weights, site
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.weights.release(ctx.site)
        return gradients[0], None, None


class GatheredWeights:
    """The weights of one stage, by site."""

    def __init__(self, sites: Sequence[Sequence[Bucket]], *, starts_with_embedding: bool) -> None:
        """`sites`: the buckets of each site, in forward order. The backward pass of an embedding needs no
        weights."""
        self._published = [[bucket for bucket in site if not bucket.gathers] for site in sites]
        residents = {id(b): _Resident(b) for site in sites for b in site if b.gathers}
        self._gathered = [[residents[id(b)] for b in site if b.gathers] for site in sites]
        self._first = 1 if starts_with_embedding else 0
        """First site whose backward pass needs its weights."""
        gathering = [site for site, members in enumerate(self._gathered) if members]
        self._following = dict(pairwise(gathering))
        self._preceding = {b: a for a, b in pairwise(gathering) if a >= self._first}

    def use(self, site: int, work: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """See `Weights.use`."""
        for bucket in self._published[site]:
            bucket.publishing.wait()
        for bucket in self._published[site + 1] if site + 1 < len(self._published) else ():
            if isinstance(bucket.publishing, Chain):  # on to its second level, beside this site's work
                bucket.publishing.advance()
        if not self._gathered[site]:
            return work(inputs)
        is_training = torch.is_grad_enabled() and site >= self._first
        self.hold(site, self._following.get(site))
        if is_training:
            inputs = _AfterBackward.apply(inputs, self, site)
        output = work(inputs)
        self.release(site)
        return _BeforeBackward.apply(output, self, site) if is_training else output

    def hold(self, site: int, coming: int | None) -> None:
        """Wait for a site's weights, and begin to gather those of the site that comes next."""
        for resident in self._gathered[site]:
            resident.fetch()
        for resident in self._gathered[coming] if coming is not None else ():
            resident.fetch()
        for resident in self._gathered[site]:
            resident.hold()

    def hold_for_backward(self, site: int) -> None:
        """The same on the way back."""
        self.hold(site, self._preceding.get(site))

    def release(self, site: int) -> None:
        """Give a site's weights back."""
        for resident in self._gathered[site]:
            resident.release()
