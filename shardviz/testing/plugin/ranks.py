"""A test on a rank: import its module, unpack its arguments, run it, write the outcome.

Runs in ranks only, which have torch.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import sys
import warnings
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed.device_mesh import init_device_mesh

from shardviz.live.compat.pipelines import let_stages_meet
from shardviz.live.world.failures import pickled
from shardviz.live.world.group import seed
from shardviz.testing.assertions.message import is_reported_once
from shardviz.testing.assertions.subjects import current_mesh
from shardviz.testing.plugin import compat, debugging, outcome, parcel

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from torch.distributed.device_mesh import DeviceMesh

    from shardviz.layout.mesh import Mesh
    from shardviz.live.world import World
    from shardviz.testing.plugin.outcome import Warned
    from shardviz.testing.plugin.parcel import Parcel


def run_test(world: World, sent: Parcel) -> list[Warned]:
    """Run a test on this rank.

    Returns:
        The warnings that it gave.
    """
    function: Callable[..., Any] = run_test
    try:
        module = parcel.load(sent.source)
        parcel.explain_assertions(sent.source, sent.style.verbosity)
        parcel.bind(sent, module)
        owner = pickle.loads(sent.instance) if sent.instance else parcel.owner_of(sent, module)
        function = getattr(owner, sent.function)
        values = parcel.unpack_arguments(sent, module)
        values.update(dict.fromkeys(sent.arguments.meshes, device_mesh(sent.mesh, world.device_type)))
        seed(sent.seed)
        debugging.give_terminal(sent.terminal, world.rank)
        config = parcel.config(sent.source.root)
        with _warnings(sent) as caught, _own_fixtures(sent.arguments.made, config, sent.log_level) as fixtures:
            call(partial(function, **values, **fixtures), sent.function)
    except SystemExit:
        raise
    except BaseException as error:
        outcome.write(sent.folder, outcome.describe(world.rank, error, function, sent.style))
        debugging.post_mortem(error, sent.terminal, world.rank, sent.folder)
        raise
    return list(dict.fromkeys(map(_pickled_warning, caught)))


def call(function: Callable[[], Any], name: str) -> None:
    """Call a test and run a returned coroutine; warn of any other result, as pytest does."""
    let_stages_meet()
    returned = function()
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    if returned is not None:
        text = f"{name} returned {type(returned)!r}: tests return None. Did you mean to use `assert`?"
        warnings.warn(pytest.PytestReturnNotNoneWarning(text), stacklevel=2)


def device_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """Make torch's mesh, the one that assertions go by. Every rank calls this."""
    torch_mesh = init_device_mesh(device_type, mesh.shape, mesh_dim_names=mesh.axes)
    current_mesh.set(torch_mesh)
    is_reported_once.set(True)
    return torch_mesh


@contextmanager
def _warnings(sent: Parcel) -> Iterator[list[warnings.WarningMessage]]:
    """Record warnings under the filters that pytest has for this test."""
    with warnings.catch_warnings(record=True) as caught:
        if not sys.warnoptions:
            warnings.filterwarnings("always", category=DeprecationWarning)
            warnings.filterwarnings("always", category=PendingDeprecationWarning)
        compat.filter_warnings(*sent.filters)
        yield caught


def _pickled_warning(message: warnings.WarningMessage) -> Warned:
    pickled_message = pickled(message.message) if isinstance(message.message, Warning) else b""
    plain = UserWarning(f"{message.category.__name__}: {message.message}")
    return pickled_message or pickle.dumps(plain), message.filename, message.lineno


@contextmanager
def _own_fixtures(names: Collection[str], config: pytest.Config, log_level: int | None) -> Iterator[dict[str, Any]]:
    """Set up pytest's own fixtures that act on their process, such as `capsys`.

    They are made by pytest's own functions. Log records go to stderr, as in a report of pytest.
    """
    with ExitStack() as stack:
        node = compat.catch_logs(stack, log_level)
        request = SimpleNamespace(
            config=config, node=node, fixturename="", raiseerror=partial(pytest.fail, pytrace=False)
        )
        yield {name: stack.enter_context(_fixture_value(name, request)) for name in names}


@contextmanager
def _fixture_value(name: str, request: SimpleNamespace) -> Iterator[Any]:
    request.fixturename = name
    function = compat.fixture_function(name)
    takes_request = "request" in function.__code__.co_varnames[: function.__code__.co_argcount]
    steps = function(request) if takes_request else function()
    yield next(steps)
    next(steps, None)
