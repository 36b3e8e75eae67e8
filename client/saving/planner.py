"""Takes states apart, and plans what this rank stages of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from sidesave.client.increments import Increments
from sidesave.client.ranks.group import NodeWorld, World
from sidesave.client.saving.shard_plan import ShardPlan, ShardPlanner, with_tables
from sidesave.stager.gc_pause import gc_paused
from sidesave.stager.plan import Plan, SignatureCache, StateSignature, Structure, make_plan
from sidesave.stager.state import tree
from sidesave.stager.state.flat_state import FlatState
from sidesave.stager.state.recall import Recall

_MAX_PLANS: Final = 8


class Planner:
    """The plans of one checkpointer; it remembers what has not changed since the save before."""

    def __init__(
        self, node: World, increments: Increments, *, allow_pickle: bool, file_nbytes: int | None
    ) -> None:
        """Plan for this rank of ``node``; see :func:`make_plan` for ``file_nbytes``."""
        alone = node.size == 1 and not isinstance(node, NodeWorld)
        self._increments = increments
        self._allow_pickle = allow_pickle
        self._file_nbytes = file_nbytes
        self._ranks = None if alone else node.ranks
        self._shards = None if alone else ShardPlanner(node, file_nbytes)
        self._recall = Recall()
        self._looks = SignatureCache()
        self._last: tuple[StateSignature, Plan] | None = None

    @gc_paused()
    def flatten(self, state: Mapping[str, Any], *, meta: bool = False) -> FlatState:
        """Take a state apart; one call at a time. ``meta`` allows tensors without values.

        Raises:
            UnsupportedValueError: The state holds something that cannot be saved.
        """
        return tree.flatten(
            state,
            allow_pickle=self._allow_pickle,
            ranks=self._ranks,
            recall=self._recall,
            meta=meta,
        )

    def plan(self, flat: FlatState) -> ShardPlan:
        """Lay out what this rank stages of a state, and choose which saves its tables link to."""
        tables = self._increments.shares(flat) if flat.tables else []
        flat.row_images = [image for share in tables for image in share.images]
        if self._shards is not None:
            return self._shards.plan(flat, tables)
        looks = flat.looks = self._looks.of(flat)
        last = self._last
        if last is None or last[0] is not looks:
            last = self._last = looks, _plan_of(looks.structure, self._file_nbytes)
        plan = with_tables(last[1], tables, "", self._file_nbytes) if tables else last[1]
        return ShardPlan(flat, plan, (), b"", b"", tuple(tables))

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise for values that cannot be saved, as far as they are known before training."""
        tree.check(state, allow_pickle=self._allow_pickle, ranks=self._ranks)


@functools.lru_cache(maxsize=_MAX_PLANS)
def _plan_of(structure: Structure, file_nbytes: int | None) -> Plan:
    return make_plan(structure, file_nbytes=file_nbytes)
