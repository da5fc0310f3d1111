"""Messages: their annotations say how they are read, written, and described to others.

A message is a frozen dataclass, a `Request` or an `Answer`. Each of its fields has a form, which follows from
its annotation; `Annotated` says what a type alone does not::

    tokens: Annotated[int, Range(1, 65536)]        an integer within bounds
    name: Annotated[str, Pattern(r"[a-z]+")]       a string of that shape
    nbytes: Annotated[int, Range(0, 9), Name("bytes")]   called otherwise in JSON
    span: Annotated[Span, INLINE]                  its fields are those of this object
    salt: Annotated[str | None, SPARSE] = None     left out where it is None, in an answer too
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum, StrEnum
from math import inf
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from kvtcd.core.errors import BadRequest
from kvtcd.core.forms import (
    BOOL,
    KEY,
    Form,
    Pattern,
    Range,
    Schema,
    choice,
    integer,
    nullable,
    number,
    sequence,
    table,
    text,
)
from kvtcd.core.keys import EngineKey


@dataclass(frozen=True, slots=True)
class Name:
    """What a field is called in JSON."""

    name: str


class Mark(Enum):
    """How a field stands in its object."""

    INLINE = "its own fields stand there"
    SPARSE = "left out where it is None"


INLINE, SPARSE = Mark.INLINE, Mark.SPARSE


def form_of(hint: Any) -> Form[Any]:  # noqa: ANN401 - a type as it stands in an annotation
    """Return the form that follows from an annotation."""
    if get_origin(hint) is Annotated:
        base, *marks = get_args(hint)
        for mark in marks:
            match mark:
                case Form():
                    return mark
                case Range() if base in {int, float}:
                    return (integer if base is int else number)(mark)
                case Range():
                    return sequence(form_of(get_args(base)[0]), mark)
                case Pattern():
                    return text(mark)
                case _:  # it says how the field stands, not what it is
                    pass
        return form_of(base)
    origin, args = get_origin(hint), get_args(hint)
    if origin in {Union, types.UnionType}:
        if set(args) == {int, float}:
            return number(Range(-inf))
        (inner,) = (arg for arg in args if arg is not types.NoneType)
        return nullable(form_of(inner))
    if origin is Literal:
        return choice({value: value for value in args})
    if origin in {tuple, list, Sequence}:
        return sequence(form_of(args[0]))
    if origin in {dict, Mapping}:
        return table(form_of(args[1]))
    if hint is EngineKey:
        return KEY
    if isinstance(hint, type):
        if issubclass(hint, StrEnum):
            return choice({str(value): value for value in hint})
        plain: dict[type, Form[Any]] = {
            bool: BOOL, int: integer(Range(0)), float: number(Range(-inf)), str: text()
        }  # fmt: skip
        return plain[hint] if hint in plain else object_of(hint).form
    raise TypeError(f"{hint} has no form")


class derived(property):  # noqa: N801 - used as a decorator, like `property`
    """A field that follows from others: it is written and described, and not read."""


@dataclass(frozen=True, slots=True)
class Member:
    """One field of a message: its name in Python and in JSON, and how it stands there."""

    attribute: str
    name: str
    form: Form[Any]
    optional: bool
    inline: Object | None
    sparse: bool


class Object:
    """The form of a dataclass; see `object_of`."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._strict = issubclass(cls, Request)
        hints = get_type_hints(cls, include_extras=True)
        self.members = [
            _member(one.name, hints[one.name], optional=_has_default(one), strict=self._strict)
            for one in fields(cls)
        ]
        self.derived = {
            name: form_of(get_type_hints(value.fget, include_extras=True)["return"])
            for name, value in vars(cls).items()
            if isinstance(value, derived) and value.fget
        }
        self.names: frozenset[str] = frozenset(
            name for m in self.members for name in (m.inline.names if m.inline else {m.name})
        )
        self.required = frozenset(name for name, (_, must) in self.properties().items() if must)
        self.form: Form[Any] = Form(self.schema(), self.read, self.write)

    def properties(self) -> dict[str, tuple[Schema, bool]]:
        """Return the schema of each field, and whether it must be there."""
        found: dict[str, tuple[Schema, bool]] = {}
        for member in self.members:
            if member.inline:
                found |= member.inline.properties()
            else:
                absent = member.sparse or (member.optional and self._strict)
                found[member.name] = member.form.schema, not absent
        return found | {name: (form.schema, True) for name, form in self.derived.items()}

    def schema(self) -> Schema:
        """Return the schema of the whole."""
        properties = self.properties()
        required = [name for name in properties if name in self.required]
        return {
            "title": self._cls.__name__,
            "type": "object",
            "properties": {name: schema for name, (schema, _) in properties.items()},
            **({"required": required} if required else {}),
            **({"additionalProperties": False} if self._strict else {}),
        }

    def read(self, path: str, body: Any) -> Any:  # noqa: ANN401 - JSON in, a message out
        """Read an object; `path` leads to it, and is empty at the top."""
        if not isinstance(body, dict):
            raise BadRequest(path or self._cls.__name__, "is not a JSON object")
        if self._strict and (unknown := sorted(body.keys() - self.names)):
            raise BadRequest(_below(path, unknown[0]), "is not a known field")
        return self.take(path, body)

    def take(self, path: str, body: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON in, a message out
        """Read the own fields of an object that may have others."""
        given = {}
        for member in self.members:
            if member.inline:
                given[member.attribute] = member.inline.take(path, body)
                continue
            value, name = body.get(member.name), _below(path, member.name)
            if value is not None or (member.name in body and not member.optional):
                given[member.attribute] = member.form.read(name, value)
            elif not member.optional:
                raise BadRequest(name, "is missing")
        return self._cls(**given)

    def write(self, message: Any) -> dict[str, object]:  # noqa: ANN401 - a message of this class
        """Return the JSON form."""
        body = {name: form.write(getattr(message, name)) for name, form in self.derived.items()}
        for member in self.members:
            value = getattr(message, member.attribute)
            if member.inline:
                body |= member.inline.write(value)
            elif value is not None or not member.sparse:
                body[member.name] = member.form.write(value)
        return body


def _has_default(one: Field[Any]) -> bool:
    return one.default is not MISSING or one.default_factory is not MISSING


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _member(attribute: str, hint: Any, *, optional: bool, strict: bool) -> Member:  # noqa: ANN401 - a type
    marks = hint.__metadata__ if get_origin(hint) is Annotated else ()
    name = next((mark.name for mark in marks if isinstance(mark, Name)), attribute)
    inline = object_of(get_args(hint)[0]) if INLINE in marks else None
    sparse = SPARSE in marks or (strict and optional)
    return Member(attribute, name, form_of(hint), optional, inline, sparse)


_OBJECTS: dict[type, Object] = {}


def object_of(cls: type) -> Object:
    """Return the form of a dataclass, which is made once."""
    if cls not in _OBJECTS:
        _OBJECTS[cls] = Object(cls)
    return _OBJECTS[cls]


class Message:
    """What daemon and clients say to each other; `fault` is what a wrong field raises."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Any]]
    fault: ClassVar[type[BadRequest]] = BadRequest

    def to_json(self) -> dict[str, object]:
        """Return the JSON form."""
        return object_of(type(self)).write(self)

    @classmethod
    def from_json(cls, body: object) -> Self:
        """Build from the form that `to_json` writes.

        Raises:
            BadRequest: a field is missing, of the wrong type or out of range; in a request, unknown.
        """
        try:
            read: Self = object_of(cls).read("", body)
        except BadRequest as error:
            if isinstance(error, cls.fault):
                raise
            raise cls.fault(error.field, error.why) from None
        return read


class Request(Message):
    """Read strictly, down to unknown fields; what is not given is left out."""

    __slots__ = ()


class Answer(Message):
    """Unknown fields are left alone, so that an older client understands a newer daemon; None is null."""

    __slots__ = ()
