"""A step's operators return the same under the mode of a plan as under torch's own, whose cache has other keys."""

from __future__ import annotations

import pickle
import weakref
from functools import wraps
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardviz.live.compat.fakes import fake_mode, know_fakes, new_fakes
from shardviz.live.plan.forks import ask
from tests.lanes import at_night, nightly

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down what every operator returns, and which of its arguments that shares memory with."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        given = [one for one in tree_leaves((args, kwargs)) if torch.is_tensor(one)]
        for one in tree_leaves(returned):
            self.lines.append(f"{func}: {described(one, given)}")
        return returned


def described(one: Any, given: list[Tensor]) -> str:
    if isinstance(one, torch.ScriptObject):
        return "an object"
    if not torch.is_tensor(one):
        return repr(one)
    storage = one.untyped_storage()
    shares = [at for at, other in enumerate(given) if other.untyped_storage()._cdata == storage._cdata]
    flags = one.requires_grad, one.is_conj(), one.is_neg(), one.is_contiguous(), one.device
    return f"{one.dtype} {one.shape} {one.stride()} {one.storage_offset()} {storage.nbytes()} {flags} {shares}"


def strides() -> Iterator[Tensor]:
    x = torch.randn(4, 6)
    for one in (x, x.t(), x[:, ::2], x[1:], x[:, 1:], x.expand(2, 4, 6), x.t().contiguous()):
        yield one.reshape(-1)
        yield one.clone() + one
        yield one.view(torch.int32)[..., :1]


def kinds_of_numbers() -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        x = torch.ones(3, dtype=dtype)
        yield x + 1
        yield x + 1.0
        yield x + True
        yield torch.full((2,), 1)
        yield torch.full((2,), 1.0)
        yield torch.full((2,), True)


def default_dtype() -> Iterator[Tensor]:
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            yield torch.arange(3) / 2
            yield torch.full((2,), 1.5)
        finally:
            torch.set_default_dtype(torch.float32)


def gradients() -> Iterator[Tensor]:
    for needed in (False, True, False):
        x = torch.randn(3, 3).requires_grad_(needed)
        yield x.detach()
        yield (x * x).sum()
        with torch.no_grad():
            yield x.t()
            yield x.add_(1)
        x.requires_grad_(False)
        yield x.add_(1)


def resized() -> Iterator[Tensor]:
    x = torch.randn(8)
    for size in (0, 32, 64, 32):
        x.untyped_storage().resize_(size)
        yield x.detach()
        yield x[:0] + 1


def changed_in_place() -> Iterator[Tensor]:
    for _ in range(2):
        x = torch.randn(2, 3)
        yield x.t_()
        yield x + 1
        yield x.unsqueeze_(0)
        yield x + 1
        yield x.squeeze_()
        yield x.resize_(1, 2)
        yield x + 1


def conjugated() -> Iterator[Tensor]:
    x = torch.randn(3, dtype=torch.complex64)
    for one in (x, x.conj(), x, x.conj().imag, x.imag):
        yield one.clone()
        yield one * 2


def lists() -> Iterator[Tensor]:
    x = torch.randn(12)
    for sizes in ([4, 8], [8, 4], [4, 4, 4], [12]):
        yield from x.split(sizes)
        yield torch.cat(x.split(sizes))
        yield torch.cat([x.split(sizes)[0]] * 2)
    yield torch.stack([x, x])
    yield from torch._foreach_add([x, x[:3]], 1)
    yield from torch._foreach_add([x[:3], x], 1)
    yield from x.chunk(5)


def devices() -> Iterator[Tensor]:
    for device in ("cpu", "meta", "cpu"):
        x = torch.randn(3, device=device)
        yield x + 1
        yield torch.zeros_like(x)
    with torch.device("meta"):
        yield torch.ones(2)
    yield torch.ones(2)


def tied_in_inference() -> Iterator[Tensor]:
    x = torch.randn(3)
    yield x * 2
    with torch.inference_mode():
        y = torch.randn(3)
        yield y * 2
        yield x * 2
    yield x * 2


def convolutions() -> Iterator[Tensor]:
    for groups, padding in ((1, 0), (2, 1), (1, 1)):
        layer = nn.Conv2d(4, 4, 3, groups=groups, padding=padding)
        x = torch.randn(2, 4, 8, 8)
        for one in (x, x.contiguous(memory_format=torch.channels_last)):
            out = layer(one)
            out.sum().backward()
            yield out
            yield layer.weight.grad
            layer.zero_grad()


def attention() -> Iterator[Tensor]:
    for length in (4, 8, 4):
        q = torch.randn(1, 4, length, 8, requires_grad=True)
        k = torch.randn(1, 2, length, 8)
        for causal in (True, False):
            out = functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True)
            out.sum().backward()
            yield out


def random_numbers() -> Iterator[Tensor]:
    for rate in (0.0, 0.5):
        yield functional.dropout(torch.randn(8), rate)
        yield torch.bernoulli(torch.full((3,), rate))


def indices() -> Iterator[Tensor]:
    x = torch.randn(5, 3)
    for at in (torch.tensor([0, 1]), torch.tensor([0]), torch.tensor([[0, 1]])):
        yield x[at]
        yield x.index_select(0, at.flatten())
        yield x.index_put((at,), torch.zeros(3))


def empty() -> Iterator[Tensor]:
    for shape in ((0, 3), (3, 0), (0,), ()):
        x = torch.randn(shape)
        yield x.sum()
        yield x.clone()
        yield x.reshape(-1)


def wrapped_around() -> Iterator[Tensor]:
    x = torch.randn(2, 3, 4)
    for dim in (0, 1, 2, -1, -2):
        yield x.sum(dim)
        yield x.sum(dim, keepdim=True)
        yield x.softmax(dim)
        yield x.transpose(dim, 0)


def negative_zero() -> Iterator[Tensor]:
    x = torch.ones(2)
    for number in (0.0, -0.0, 0, float("nan"), float("nan"), float("inf")):
        yield x * number
        yield torch.clamp(x, min=number)


def norms() -> Iterator[Tensor]:
    for kind in (nn.LayerNorm, nn.RMSNorm):
        for dtype in (torch.float32, torch.bfloat16):
            out = kind(6, dtype=dtype)(torch.randn(4, 6, dtype=dtype, requires_grad=True))
            out.float().sum().backward()
            yield out


def optimizers() -> Iterator[Tensor]:
    layer = nn.Linear(4, 4)
    own = torch.optim.AdamW(layer.parameters(), foreach=True)
    for _ in range(2):
        layer(torch.randn(2, 4)).sum().backward()
        own.step()
        yield from (value for state in own.state.values() for value in state.values() if torch.is_tensor(value))
        own.zero_grad()


def mixed() -> Iterator[Tensor]:
    layer = nn.Linear(4, 4)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype):
            yield layer(torch.randn(2, 4)).sum()
    yield layer(torch.randn(2, 4))


PROGRAMS: list[Callable[[], Iterator[Any]]] = [
    strides,
    kinds_of_numbers,
    default_dtype,
    gradients,
    resized,
    changed_in_place,
    conjugated,
    lists,
    devices,
    tied_in_inference,
    convolutions,
    attention,
    random_numbers,
    indices,
    empty,
    wrapped_around,
    negative_zero,
    norms,
    optimizers,
    mixed,
]


def lines(mode: Any, program: Callable[[], Iterator[Any]]) -> list[str]:
    """Run a program three times, so that what is in a cache is used, and return what its operators returned."""
    found: list[str] = []
    with mode:
        for _ in range(3):
            with Seen() as seen:
                seen.lines += [f"yields {described(one, [])}" for one in program()]
            found += seen.lines
    return found


def in_a_fork(test: Callable[..., None]) -> Callable[..., None]:
    """Call a test in a fork: a backward under `FakeTensorMode` starts threads in torch 2.15, and no fork may follow."""

    @wraps(test)
    def forked(*args: Any, **kwargs: Any) -> None:
        ask([0], lambda _: test(*args, **kwargs))

    return forked


@pytest.mark.parametrize("program", PROGRAMS)
@in_a_fork
def test_operators_return_what_they_do_with_keys_of_torch(program: Callable[[], Iterator[Any]]) -> None:
    new_fakes()
    assert lines(fake_mode(), program) == lines(FakeTensorMode(allow_non_fake_inputs=True), program)
    known = pickle.loads(pickle.dumps(new_fakes()))
    know_fakes(known)
    assert len(new_fakes()) == len(known)
    assert lines(fake_mode(), program) == lines(FakeTensorMode(allow_non_fake_inputs=True), program)
    assert not new_fakes()


CACHELESS = [one for one in PROGRAMS if one is not resized]


@pytest.mark.parametrize("program", [*CACHELESS[:6], *at_night(CACHELESS[6:])])
@in_a_fork
def test_operators_return_what_they_do_without_a_cache(program: Callable[[], Iterator[Any]]) -> None:
    plain = FakeTensorMode(allow_non_fake_inputs=True)
    plain.cache_enabled = False  # a view from torch's cache gives freed memory back its size
    assert lines(fake_mode(), program) == lines(plain, program)


def test_no_tensor_is_kept() -> None:
    with fake_mode():
        x, y = torch.randn(3, 5), torch.randn(3, 5)
        seen = [weakref.ref(one) for one in (x, y)]
        torch.add(x, y)
        del x, y
        assert [one() for one in seen] == [None, None]


@nightly
@in_a_fork
def test_programs_together_share_a_cache_and_return_the_same() -> None:
    def all_of_them() -> Iterator[Any]:
        for program in PROGRAMS:
            yield from program()

    assert lines(fake_mode(), all_of_them) == lines(FakeTensorMode(allow_non_fake_inputs=True), all_of_them)
