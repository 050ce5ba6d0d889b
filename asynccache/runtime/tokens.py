"""Tokens at the edge: whatever an engine holds becomes a key, little-endian int32 in one ``bytes``.

Buffers of int32 are taken as they are (one memcpy, none for ``bytes``); a list is converted once. Below this module
every sequence of tokens is a key.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from asynccache.checks import INT32_MAX, shown
from asynccache.errors import ConfigError

TOKEN_BYTES = 4
SIGN_BYTE = TOKEN_BYTES - 1
"""A token is negative if its last byte is no ASCII."""
INT32 = np.dtype("<i4")

Tokens = Any
"""``list[int]``, ``array('i')``, a numpy array of integers, a CPU tensor, or bytes-like int32."""


def as_key(tokens: Tokens) -> bytes:
    """The key of ``tokens``.

    Raises:
        ConfigError: a token is negative or beyond int32 (the message names its position and value), or ``tokens`` is
            nothing that holds integers, or has more or fewer dimensions than one.
    """
    if type(tokens) is np.ndarray and tokens.dtype == INT32 and tokens.ndim == 1:  # what engines hold
        return _as_it_is(tokens)
    if isinstance(tokens, np.ndarray):
        key = _of_array(tokens)
    elif type(tokens) is bytes:
        key = tokens
    elif isinstance(tokens, (list, tuple)):
        key = _of_list(tokens)
    elif isinstance(tokens, (bytes, bytearray, memoryview, array)):
        key = _of_buffer(tokens)
    else:
        key = _of_array(_of_tensor(tokens))
    if len(key) % TOKEN_BYTES:
        raise ConfigError(f"tokens: {len(key)} bytes are not whole int32 tokens")
    if not key[SIGN_BYTE::TOKEN_BYTES].isascii():
        raise _negative(key)
    return key


def _as_it_is(tokens: npt.NDArray[np.int32]) -> bytes:
    """``argmin`` takes a third of what it takes to slice the key; a reduction takes longer, for there is more of it."""
    key = tokens.tobytes()
    if key and tokens.item(tokens.argmin()) < 0:
        raise _negative(key)
    return key


def _negative(key: bytes) -> ConfigError:
    values = np.frombuffer(key, np.int32)
    position = int((values < 0).argmax())
    return ConfigError(f"tokens[{position}]={values[position]} is negative")


def _of_list(tokens: Sequence[int]) -> bytes:
    try:
        return array("i", tokens).tobytes()
    except Exception:  # an object that says it were an integer may fail in any way
        raise ConfigError(_first_bad(tokens)) from None


def _first_bad(tokens: Sequence[int]) -> str:
    for position, token in enumerate(tokens):
        try:
            array("i", [token])
        except OverflowError:
            return f"tokens[{position}]={shown(token)} is beyond int32"
        except Exception:
            return f"tokens[{position}]={shown(token)} is no integer"
    return "tokens: not a sequence of integers"


def _of_buffer(tokens: bytes | bytearray | memoryview | array[int]) -> bytes:
    try:
        view = memoryview(tokens)
        if view.ndim == 1 and view.format in ("i", "l", "B", "b", "c") and view.itemsize in (1, TOKEN_BYTES):
            return view.tobytes()
        found = np.asarray(view)
    except (TypeError, ValueError, BufferError) as error:  # a format that numpy does not know; memory that was released
        raise ConfigError(f"tokens: {type(tokens).__name__} holds no int32 tokens: {error}") from None
    return _of_array(found)


def _of_array(tokens: npt.NDArray[Any]) -> bytes:
    if tokens.dtype != INT32:
        tokens = _to_int32(tokens)
    if tokens.ndim != 1:
        raise ConfigError(f"tokens: an array of {tokens.ndim} dimensions; tokens lie in one row, as in reshape(-1)")
    raw: bytes = tokens.tobytes()
    return raw


def _of_tensor(tokens: Tokens) -> npt.NDArray[np.generic]:
    """A CPU tensor without importing torch, or anything else that numpy understands."""
    try:
        to_numpy = getattr(tokens, "numpy", None)
        return np.asarray(to_numpy() if to_numpy is not None else tokens)
    except Exception as error:  # whatever it is, it fails as it likes
        raise ConfigError(f"tokens: {type(tokens).__name__} holds no int32 tokens: {error}") from None


def _to_int32(tokens: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    if tokens.dtype.kind not in "iu":
        raise ConfigError(f"tokens: dtype {tokens.dtype} is no integer type")
    beyond = tokens.reshape(-1) > INT32_MAX  # type: ignore[operator]
    if beyond.any():
        position = int(beyond.argmax())
        raise ConfigError(f"tokens[{position}]={tokens.reshape(-1)[position]} is beyond int32")
    below = tokens.reshape(-1) < 0  # type: ignore[operator]
    if below.any():
        position = int(below.argmax())
        raise ConfigError(f"tokens[{position}]={tokens.reshape(-1)[position]} is negative")
    return tokens.astype("<i4")
