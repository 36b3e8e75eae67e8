"""What is loaded of a checkpoint: which leaves, under which names, and of each tensor which part."""

from __future__ import annotations

import collections
import contextlib
import logging
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NoReturn, cast

import torch

from sidesave.client.loading import keeping
from sidesave.client.loading.keeping import Stays
from sidesave.client.loading.plan import DICTS, Expected, Pickled, names_of
from sidesave.client.loading.rename import Rearrangement, Rename, Renaming, leaves
from sidesave.client.loading.sharded import Local
from sidesave.client.messages import few
from sidesave.client.reading import filters
from sidesave.client.reading.checkpoint_reader import CheckpointReader, Reader, Wanted
from sidesave.client.reading.filters import Word, listed, selector
from sidesave.errors import (
    IntegrityError,
    InvalidArgumentError,
    StateMismatchError,
    UnsupportedValueError,
    WriteError,
)
from sidesave.stager.state.treespec import Skeleton, TensorRef

logger = logging.getLogger(__name__)

_ASKED: Final = 64
"""So many ranks are asked for what they have alone, when a pattern matches nothing that this one sees."""


class Choice:
    """What is wanted of a checkpoint, in the words of :func:`load`, checked.

    Attributes:
        selected: Whether a name of the checkpoint is chosen.
        renaming: Gives the target's names for those.
        cast_to: The dtype for floating-point tensors.
        required: Of names of the target, whether the checkpoint has to have them; None is all.
        strict: Whether a word that speaks of nothing is an error.
        words: What speaks of names in the checkpoint.
    """

    def __init__(
        self,
        include: str | Sequence[str] | None,
        exclude: str | Sequence[str] | None,
        rename: Rename | None,
        dtype: torch.dtype | None,
        *,
        strict: bool = True,
    ) -> None:
        """``InvalidArgumentError`` for what cannot be."""
        if dtype is not None and not dtype.is_floating_point:
            raise InvalidArgumentError(f"dtype casts floating-point tensors, so it cannot be {dtype}")
        self.cast_to = dtype
        self.selected: Callable[[str], bool] = selector(include, exclude)
        self.renaming = Renaming(rename)
        self.required: Callable[[str], bool] | None = None
        if include is not None or exclude is not None:
            self.required = self._is_required
        self.strict = strict
        self.words: list[Word] = [
            *(Word("include", text) for text in listed(include, "include") or ()),
            *(Word("exclude", text) for text in listed(exclude, "exclude") or ()),
            *(Word("rename", text) for text in self.renaming.rules()),
        ]

    def leaves_out(self, name: str) -> bool:
        """Whether patterns leave out what the target calls ``name``."""
        return not self._is_required(name)

    def _is_required(self, name: str) -> bool:
        origins = self.renaming.origins(name)
        return origins is None or any(map(self.selected, origins))


class Selection:
    """What is loaded of a checkpoint: which leaves, under which names, and of each tensor which part.

    Attributes:
        nest: What is loaded as it will be, with :class:`Expected` and :class:`Pickled` for what has to be read.
        partial: The names in it of what not all ranks have saved.
        renaming: Of the names in the checkpoint.
        where: The checkpoint.
        given: The objects of the target that take their state whole, and have some here.
        incomplete: Those of them that have something left out of it.
    """

    def __init__(self, reader: Reader, choice: Choice, into: Mapping[str, Any] | None, *, allow_pickle: bool) -> None:
        """Choose what ``into`` has an item for, all where that is None; nothing is unpickled, and no tensor read.

        Raises ``StateMismatchError`` when words of a strict ``choice`` speak of nothing that there is, or when what
        they leave out of an optimizer, or of another object that takes its state whole, cannot stay as it is.
        """
        self.renaming = choice.renaming
        self.where = reader.path
        self._reader = reader
        self._cast_to = choice.cast_to
        self._sparse: dict[str, Expected] = {}
        self._fqns = _names_in(reader.skeleton, Pickled if allow_pickle else None)
        self._refuse_idle(choice, into)
        names = self._names(choice, into)
        objects = keeping.whole_targets(into)
        self.given = keeping.given(names.values(), objects)
        wholes = objects if choice.words or self.renaming else {}
        if choice.words:
            everything = (self.renaming(fqn) or fqn for fqn in self._fqns)
            broken = keeping.broken_lists(into, everything, names.values())
            if broken:
                hint = "of a list in into= no single item can be left out; put them into a dict, by names"
                self._refuse([f"{name}: {hint}" for name in broken])
        staying = dict(keeping.left_out(self._fqns, names, wholes))
        self.incomplete = {name for name in wholes if any(each.startswith(f"{name}.") for each in staying.values())}
        names |= staying
        fqns: list[str] = []

        def chosen(fqn: str) -> bool:
            if fqn in names:
                fqns.append(fqn)
            return fqn in names

        def refuse_pickled(data: bytes) -> Stays:  # no key is pickled, or that would have been told above
            if fqns[-1] in staying:
                return Stays.AS_IT_IS
            told = f"{fqns[-1]} was pickled; pass allow_pickle=True if you trust who wrote it"
            raise UnsupportedValueError(f"{reader.path}: {told}")

        partial: set[str] = set()
        unpickle = Pickled if allow_pickle else refuse_pickled
        nest = reader.skeleton.build(Expected, only=chosen, unpickle=unpickle, partial=partial)
        found = leaves(nest)
        if len(found) != len(fqns):
            raise IntegrityError(f"{reader.path}: a container holds {len(found)} of {len(fqns)} items")
        stays = {fqn: Stays.AS_IT_IS for fqn, name in staying.items() if not keeping.is_structure(name, wholes)}
        for fqn, leaf in zip(fqns, found, strict=True):
            if isinstance(leaf, Expected) and fqn not in stays:
                leaf.look_up(reader, self._cast_to)
                if leaf.ref.sparse_shape is not None:
                    self._sparse[fqn] = leaf
        self.nest: dict[str, Any] = nest
        self.partial: Collection[str] = partial
        if self.renaming or stays:
            arranged = Rearrangement(names.__getitem__, into, partial)
            self.nest = arranged.build(nest, fqns, stays)
            self.partial = arranged.partial
        problems = keeping.keep(into, self.nest, choice.leaves_out) if into and wholes else []
        if problems:
            self._refuse(few(problems, str, "cannot stay"))

    def _names(self, choice: Choice, into: Mapping[str, Any] | None) -> dict[str, str]:
        """What is chosen for the target, and what it is called there."""
        found: dict[str, str] = {}
        prefixes = tuple(name + "." for name in into or ())
        for fqn in self._fqns:
            name = self.renaming(fqn) if choice.selected(fqn) else None
            if name is not None and (into is None or name in into or name.startswith(prefixes)):
                found[fqn] = name
        return found

    def _refuse_idle(self, choice: Choice, into: Mapping[str, Any] | None) -> None:
        """Words that speak of nothing are misspelt, most likely, and then all is loaded, or not what was meant.

        A live target tells of old names itself: what they were to become is missing there, unless the checkpoint has
        the new names already, as later ones of the same run do.
        """
        idle = filters.idle(choice.words, self._fqns)
        if any(word.kind == "exclude" for word in idle):  # it may tell of something new that the checkpoint has not
            new = [fqn for name, target in (into or {}).items() for fqn in names_of(target, name)]
            known = {origin for name in new for origin in self.renaming.origins(name) or (name,)}
            unknown = filters.idle(idle, known)
            idle = [word for word in idle if word.kind != "exclude" or word in unknown]
        elsewhere = self._names_of_others()
        while idle and (names := next(elsewhere, None)) is not None:
            idle = filters.idle(idle, names)
        if not idle:
            return
        hints = filters.Hints(self._fqns, self.items())
        wrong = [word for word in idle if choice.strict and not (word.kind == "rename" and into is not None)]
        if wrong:
            self._refuse(few(wrong, hints.line, "speak of nothing"))
        logger.warning("loading %s: %s", self.where, "; ".join(few(idle, hints.line, "speak of nothing")))

    def _names_of_others(self) -> Iterator[list[str]]:
        """What other ranks have saved, of which this one does not see what they have for themselves alone."""
        if not isinstance(self._reader, CheckpointReader):
            return
        for rank in range(min(self._reader.manifest.world_size, _ASKED)):
            if rank != self._reader.rank:
                with contextlib.suppress(IntegrityError, WriteError):  # what nobody needs may be damaged
                    yield _names_in(self._reader.read_skeleton(rank), Pickled)

    def _refuse(self, lines: Sequence[str]) -> NoReturn:
        raise StateMismatchError(f"{self.where} does not fit, and nothing was loaded:\n  " + "\n  ".join(lines))

    def items(self) -> list[str]:
        """The names at the top of the checkpoint."""
        return self._reader.skeleton.keys()

    def names(self) -> list[str]:
        """Everything that the checkpoint has, whatever is chosen of it, under its new names; and what is at the top."""
        return [*self.items(), *(self.renaming(fqn) or fqn for fqn in self._fqns)]

    def needed(self, nest: Mapping[str, Any]) -> dict[Expected | Pickled, None]:
        """What there is to read of this checkpoint for a nest, in its order."""
        mine = {leaf: None for leaf in leaves(self.nest) if isinstance(leaf, (Expected, Pickled))}
        return {leaf: None for leaf in leaves(nest) if isinstance(leaf, (Expected, Pickled)) and leaf in mine}

    def check_apart(self, needed: Iterable[Expected | Pickled], *, live: bool) -> None:
        """Tensors that are not the same on the ranks that have saved them, and of which none is this rank's.

        Of buffers, and where no live object takes them, the first rank's are taken, with a warning.
        """
        found = [(leaf, leaf.ref.fqn) for leaf in needed if isinstance(leaf, Expected)]
        odd = {fqn: (leaf, ranks) for leaf, fqn in found if (ranks := self._reader.differing(fqn))}
        strict = {fqn: ranks for fqn, (leaf, ranks) in odd.items() if live and not leaf.is_buffer}
        told = strict or {fqn: ranks for fqn, (_, ranks) in odd.items()}
        lines = [f"{fqn} differs between ranks {_brief(ranks)}" for fqn, ranks in list(told.items())[:20]]
        lines += [f"and {len(told) - 20} more"] if len(told) > 20 else []
        if strict:
            text = "\n  ".join(["nothing was loaded:", *lines])
            raise StateMismatchError(f"{text}\nload with as many ranks, or leave it out with exclude=")
        if odd:
            where = "and this is another number of ranks, or one that had none"
            logger.warning("loading %s: %s, %s; of each the first rank's is taken", self.where, "; ".join(lines), where)

    def read(
        self, needed: Iterable[Expected | Pickled], device: str | torch.device | None, *, verify: bool
    ) -> dict[Expected | Pickled, Any]:
        """Values for leaves, read and verified; a part of a tensor is a :class:`Local`."""
        tensors = [leaf for leaf in needed if isinstance(leaf, Expected) and leaf.ref.sparse_shape is None]
        sparse = {fqn: leaf for fqn, leaf in self._sparse.items() if leaf in needed}
        parts = self._parts(sparse) if sparse else []
        wanted = [leaf.wanted for leaf in [*tensors, *parts] if leaf.wanted]
        stored = self._reader.read_boxes(wanted, verify=verify)
        made: dict[tuple[Wanted, bool, torch.dtype | None], torch.Tensor] = {}

        def tensor(leaf: Expected) -> Any:
            wanted, shard = leaf.wanted, leaf.shard
            if wanted is None:
                assert shard is not None
                return Local(shard, shard.empty(leaf.dtype))
            key = wanted, leaf.ref.array, leaf.cast_to
            if key not in made:  # tied weights come back tied
                made[key] = _finish(stored[wanted], leaf.ref, device, leaf.cast_to)
            if shard is not None:
                return Local(shard, made[key])
            return made[key].numpy() if leaf.ref.array else made[key]

        values: dict[Expected | Pickled, Any] = {leaf: tensor(leaf) for leaf in tensors}
        if sparse:
            known = {part.ref: part for part in parts}
            nest = self._reader.skeleton.build(lambda ref: tensor(known[ref]), only=sparse.__contains__)
            values.update(zip(sparse.values(), leaves(nest), strict=True))
        # Only now, when all else is known to be as it should be, code of the checkpoint's may run.
        values.update({leaf: pickle.loads(leaf.data) for leaf in needed if isinstance(leaf, Pickled)})
        return values

    def _parts(self, sparse: Collection[str]) -> list[Expected]:
        """The tensors that sparse ones consist of."""
        refs: list[TensorRef] = []
        self._reader.skeleton.build(refs.append, only=sparse.__contains__)
        parts = [Expected(ref) for ref in refs if ref.sparse_shape is None]
        for part in parts:
            part.look_up(self._reader, self._cast_to)
        return parts


def _names_in(skeleton: Skeleton, unpickle: Callable[[bytes], Any] | None) -> list[str]:
    """The names of all leaves, of which none is built; an ``UnsupportedValueError`` for a key that was pickled."""
    found: list[str] = []
    skeleton.build(Expected, only=lambda fqn: bool(found.append(fqn)), unpickle=unpickle)
    return found


def filled(value: Any, values: Mapping[Any, Any]) -> Any:
    """A nest with its values in the place of what stands for them; dicts and lists are changed in place."""
    if isinstance(value, (Expected, Pickled)):
        return values[value]
    if type(value) in DICTS:
        items = cast("dict[Any, Any]", value)
        if any(type(key) is not str and type(key) is not int for key in items):
            pairs = [(_thawed(key), item) for key, item in items.items()]
            items.clear()
            for key, item in pairs:
                items[key] = item
        for key, item in items.items():
            items[key] = filled(item, values)
    elif type(value) is list:
        parts = cast("list[Any]", value)
        parts[:] = [filled(item, values) for item in parts]
    elif type(value) is tuple:
        return tuple(filled(item, values) for item in cast("tuple[Any, ...]", value))
    elif type(value) is collections.deque:
        queue = cast("collections.deque[Any]", value)
        return collections.deque((filled(item, values) for item in queue), queue.maxlen)
    return _thawed(value)


def _thawed(value: Any) -> Any:
    """A key, or a set, with what is pickled in it unpickled."""
    if type(value) is Pickled:
        return pickle.loads(value.data)
    if type(value) in (tuple, set, frozenset):
        parts = cast("tuple[Any, ...]", value)
        return type(parts)(map(_thawed, parts))
    return value


def _brief(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")


def _finish(
    tensor: torch.Tensor, ref: TensorRef, device: str | torch.device | None, dtype: torch.dtype | None
) -> torch.Tensor:
    if ref.dtype is not None:
        if ref.dtype.is_complex:
            tensor = torch.view_as_complex(tensor)
        else:
            tensor = tensor.view(ref.dtype)
    if ref.array:
        return tensor
    if device is not None:
        tensor = tensor.to(device)
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
