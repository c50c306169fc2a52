"""Random strings of Dyck-(k, D), and strings that differ from them by one edit.

Token t < k opens a bracket of type t, token k + t closes it, and token 2k is padding, which ends every string.
"""

from __future__ import annotations

import numpy as np


def prefixes(rng, count, length, k, depth):
    """Random prefixes of Dyck-(k, D): tokens (count, length), and the type of the innermost open bracket or -1.

    Between depth 0 and D, the next token opens or closes with equal probability.
    """
    tokens, innermost = np.empty((2, count, length), int)
    stack, height, rows = np.full((count, depth + 1), -1), np.zeros(count, int), np.arange(count)
    for n in range(length):
        opens = (height == 0) | ((height < depth) & (rng.random(count) < 0.5))
        kind = np.where(opens, rng.integers(k, size=count), stack[rows, height])
        height += np.where(opens, 1, -1)
        stack[rows[opens], height[opens]] = kind[opens]
        tokens[:, n], innermost[:, n] = np.where(opens, kind, k + kind), stack[rows, height]
    return tokens, innermost


def member(rng, length, k, depth):
    """A random string of Dyck-(k, D) of an even length; most long ones reach depth D."""
    tokens, stack = [], []
    for left in range(length, 0, -1):
        if stack and (len(stack) == min(depth, left) or rng.random() < 0.4):
            tokens.append(k + stack.pop())
        else:
            stack.append(rng.integers(k))
            tokens.append(stack[-1])
    return np.array(tokens, int)


def edited(rng, tokens, k):
    """The string after a random edit of one bracket or of two adjacent ones: mostly no member."""
    at, edit = rng.integers(len(tokens)), rng.integers(6)
    kind, closes = tokens[at] % k, tokens[at] // k
    if edit == 0:  # another type
        return np.concatenate([tokens[:at], [(kind + 1) % k + k * closes], tokens[at + 1 :]])
    if edit == 1:  # the other direction
        return np.concatenate([tokens[:at], [kind + k * (1 - closes)], tokens[at + 1 :]])
    if edit == 2:  # exchange two neighbors
        return np.concatenate([tokens[:at], tokens[at : at + 2][::-1], tokens[at + 2 :]])
    if edit == 3:
        return np.delete(tokens, at)
    return np.insert(tokens, at, rng.integers(2 * k) if edit == 4 else [kind, k + kind])  # one bracket, or a pair


def accepts(tokens, k, depth):
    """A stack machine: whether a string is in Dyck-(k, D)."""
    stack = []
    for token in tokens:
        if token < k:
            stack.append(token)
        elif not stack or stack.pop() != token - k:
            return False
        if len(stack) > depth:
            return False
    return not stack


def strings(rng, count, longest, k, depth):
    """Strings of up to `longest` tokens: members, edited members, and some that may be too deep by one."""
    made = []
    for n in range(count):
        length = 2 * rng.integers(1, longest // 2 + 1) if n > 3 else longest
        string = member(rng, length, k, depth + (n % 8 == 6))
        made.append(edited(rng, string, k) if n % 2 else string)
    return made


def padded(strings, k):
    """Strings as one array (count, length), with at least one token of padding behind each."""
    length = 1 + max(map(len, strings))
    return np.stack([np.pad(string, (0, length - len(string)), constant_values=2 * k) for string in strings])
