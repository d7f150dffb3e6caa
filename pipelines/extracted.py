"""What was extracted, value by value: checked against the pages, and brought together from the parts of a document."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from mmserve.pipelines.schemas import Json, Path, Schema, pointer
from mmserve.pipelines.values import Scalar, ValueFinder, says_nothing


@dataclass(frozen=True)
class Leaf:
    """A value and the pages on which it was read. `is_verified`: it stands there, in some way of writing it."""

    value: Scalar | None
    pages: tuple[int, ...] = ()
    is_verified: bool = False


Node: TypeAlias = dict[str, "Node"] | list["Node"] | Leaf
NULL = Leaf(None)


@dataclass(frozen=True)
class ExtractedValue:
    """A value that is not null, and its place as a JSON pointer. `pages` is empty where it was found on none."""

    path: str
    value: Scalar
    pages: tuple[int, ...]
    is_verified: bool

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "value": self.value, "pages": list(self.pages), "verified": self.is_verified}


class ValueChecker:
    """Looks up the values of one answer. `dropped` are those that no page has, and that the schema can do without.

    Such a value becomes null where the schema allows it, is left out where the schema does not require it and where it
    stands in a list, and is else kept unverified. So are true and false, and values that the schema lists: pages
    seldom say those. With `read_on`, nothing is dropped for being on no page: those pages have no text to trust.
    """

    def __init__(self, schema: Schema, finder: ValueFinder, *, read_on: tuple[int, ...] | None = None) -> None:
        self.dropped: list[str] = []
        self._num_unread = 0
        self._schema = schema
        self._finder = finder
        self._read_on = read_on

    def check(self, answer: dict[str, Json]) -> dict[str, Node]:
        checked = {name: self._checked(value, (name,)) for name, value in answer.items()}
        return {name: node for name, node in checked.items() if node is not None}

    def _checked(self, value: Json, path: Path) -> Node | None:
        """None for what is left out."""
        if isinstance(value, dict):
            checked = {name: self._checked(child, (*path, name)) for name, child in value.items()}
            return {name: node for name, node in checked.items() if node is not None}
        if isinstance(value, list):
            items = (self._item(item, (*path, place)) for place, item in enumerate(value))
            return [node for node in items if node is not None]
        return NULL if value is None else self._leaf(value, path)

    def _item(self, value: Json, path: Path) -> Node | None:
        """An entry of a list: one of which no page has anything was made up, and one without values says nothing."""
        num_dropped, num_unread = len(self.dropped), self._num_unread
        node = self._checked(value, path)
        if node is None or isinstance(node, Leaf):
            return node
        values = list(values_of(node))
        is_made_up = self._num_unread > num_unread and not any(value.is_verified for value in values)
        if is_made_up:
            self.dropped[num_dropped:] = [_told(value, path)]
        return node if values and not is_made_up else None

    def _leaf(self, value: Scalar, path: Path) -> Leaf | None:
        name = next(step for step in reversed(path) if isinstance(step, str))
        pages = self._finder.find(value, name)
        if pages:
            return Leaf(value, pages, True)
        is_nothing = isinstance(value, str) and says_nothing(value)
        is_judged = isinstance(value, bool) or self._schema.is_choice(path) or self._read_on is not None
        if is_judged and not is_nothing:
            return Leaf(value, self._read_on or ())
        self._num_unread += not is_nothing
        can_be_null = self._schema.allows_null(path)
        is_needed = isinstance(path[-1], str) and self._schema.requires(path)
        if is_needed and not can_be_null:
            return Leaf(value)
        if not is_nothing:
            self.dropped.append(_told(value, path))
        return NULL if can_be_null else None


def merged(nodes: Sequence[Node], conflicts: list[str], path: Path = ()) -> Node:
    """One value of those of several parts, in order.

    The first that a page has wins, then the first at all; of others that pages have `conflicts` tells. Objects are
    merged by property. Of lists each part's entries follow, but for those that an earlier part has.
    """
    found = [node for node in nodes if node != NULL]
    kind = type(found[0]) if found else Leaf
    if kind is dict:
        objects = [node for node in found if isinstance(node, dict)]
        names = dict.fromkeys(name for node in objects for name in node)
        return {
            name: merged([node[name] for node in objects if name in node], conflicts, (*path, name)) for name in names
        }
    if kind is list:
        return _joined([node for node in found if isinstance(node, list)])
    return _best([node for node in found if isinstance(node, Leaf)], conflicts, path)


def _joined(lists: Sequence[list[Node]]) -> list[Node]:
    entries: list[Node] = []
    known: set[str] = set()
    for nodes in lists:
        forms = [json.dumps(plain(node), sort_keys=True).casefold() for node in nodes]
        entries += [node for node, form in zip(nodes, forms, strict=True) if form not in known]
        known.update(forms)
    return entries


def _best(leaves: Sequence[Leaf], conflicts: list[str], path: Path) -> Leaf:
    verified = [leaf for leaf in leaves if leaf.is_verified]
    different = {_form(leaf.value): leaf for leaf in reversed(verified)}
    if len(different) > 1:
        told = ", ".join(f"{json.dumps(leaf.value, ensure_ascii=False)} (page {leaf.pages[0]})" for leaf in verified)
        conflicts.append(f"Pages differ, and the first was taken: {pointer(path)} is {told}.")
    return next(iter([*verified, *leaves]), NULL)


def _form(value: Scalar | None) -> object:
    return " ".join(value.casefold().split()) if isinstance(value, str) else value


def fitted(node: Node, schema: Schema, path: Path = ()) -> Node:
    """Without nulls that the schema does not allow, as far as that goes: left out, or no entries in a required list."""
    if not isinstance(node, dict):
        return node
    fitting: dict[str, Node] = {}
    for name, child in node.items():
        place = (*path, name)
        if child != NULL or schema.allows_null(place):
            fitting[name] = fitted(child, schema, place)
        elif schema.requires(place):
            fitting[name] = [] if schema.is_list(place) else child
    return fitting


def plain(node: Node) -> Json:
    """As JSON."""
    if isinstance(node, dict):
        return {name: plain(child) for name, child in node.items()}
    return [plain(child) for child in node] if isinstance(node, list) else node.value


def values_of(node: Node, path: Path = ()) -> Iterator[ExtractedValue]:
    if isinstance(node, dict):
        for name, child in node.items():
            yield from values_of(child, (*path, name))
    elif isinstance(node, list):
        for place, child in enumerate(node):
            yield from values_of(child, (*path, place))
    elif node.value is not None:
        yield ExtractedValue(pointer(path), node.value, node.pages, node.is_verified)


def _told(value: Json, path: Path) -> str:
    return f"{pointer(path)} {json.dumps(value, ensure_ascii=False)}"
