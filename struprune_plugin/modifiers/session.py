"""The host's events drive a pass; a pass inside another modifier's pass has a session of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from llmcompressor.args import DatasetArguments
from llmcompressor.core import Event, State, create_session
from llmcompressor.modifiers import Modifier
from llmcompressor.pipelines import SequentialPipeline
from llmcompressor.recipe import Recipe
from pydantic import PrivateAttr
from torch import Tensor, nn
from transformers import PreTrainedModel

from struprune_plugin.device.placement import Placement
from struprune_plugin.device.residence import hold_one_layer, keep_on_host
from struprune_plugin.device.room import Room, open_room
from struprune_plugin.model.layers import can_fuse_attention, find_decoder_layers, list_attention_configs
from struprune_plugin.passes import Pass

PIPELINE_OPTIONS = ("sequential_targets", "tracing_ignore", "sequential_offload_device", "sequential_prefetch")


class PassDriver:
    """Lets the host's events drive a pass.

    :param pass_: the pass
    :param hooks: the modifier that hooks are registered for, so that the host can disable them
    :param room: the pass'
    """

    def __init__(self, pass_: Pass, hooks: Modifier, room: Room):
        self._pass, self._hooks, self._room = pass_, hooks, room

    def start(self, model: PreTrainedModel, loader: Iterable[dict[str, Tensor]]) -> None:
        """Begin the pass, and let it see every call of every decoder layer."""
        self._pass.begin(model, loader)
        embeddings: Any = model.get_input_embeddings()
        self._hooks.register_hook(embeddings, self._see_tokens, "forward_pre", with_kwargs=True)
        for name, layer in find_decoder_layers(model):

            def before(module: nn.Module, args: tuple, call: dict, name: str = name) -> None:
                with self.abort_on_error():
                    self._room.take_ahead(module)
                    self._pass.before_layer(name, module, args, call)

            def after(_module: nn.Module, _args: tuple, output: Any) -> None:
                with self.abort_on_error():
                    self._pass.after_layer(output)

            self._hooks.register_hook(layer, before, "forward_pre", with_kwargs=True)
            self._hooks.register_hook(layer, after, "forward")

    def end_step(self, model: PreTrainedModel, modules: list[nn.Module]) -> None:
        """End the decoder layer, if any, among the modules of a calibration step; the next one's weights are fetched meanwhile.

        :raises ValueError: several layers in one step; their statistics would mix
        """
        layers = find_decoder_layers(model)
        here = [index for index, (_, layer) in enumerate(layers) if any(layer is m for m in modules)]
        if len(here) > 1:
            raise ValueError(
                f"sequential_targets_per_subgraph: must be 1 for {type(self._hooks).__name__}, got {len(here)} decoder layers "
                "in one subgraph. Leave it at its default."
            )
        for index in here:
            name, layer = layers[index]
            self._room.fetch_ahead(layers[index + 1][1] if index + 1 < len(layers) else None)
            self._pass.end_layer(name, layer)

    def finish(self) -> None:
        """Take the hooks off and conclude the pass."""
        self._hooks.remove_hooks()
        self._room.drop_ahead()
        self._pass.finish()

    def abort(self) -> None:
        """Take the hooks off and let the pass go of everything."""
        self._hooks.remove_hooks()
        self._room.drop_ahead()
        self._pass.abort()

    @contextmanager
    def abort_on_error(self) -> Iterator[None]:
        """Abort the pass where what runs inside fails."""
        try:
            yield
        except BaseException:
            self.abort()
            raise

    def _see_tokens(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._pass.see_tokens(args[0] if args else kwargs["input"])


class _NestedModifier(Modifier):
    """The host's side of a pass that has a session of its own."""

    requires_calibration_data: bool = True

    _driver: PassDriver | None = PrivateAttr(default=None)

    def on_initialize(self, state: State, **kwargs: Any) -> bool:
        return True

    def drive(self, pass_: Pass, room: Room) -> PassDriver:
        self._driver = PassDriver(pass_, self, room)
        return self._driver

    def on_calibration_start(self, state: State, event: Event, **kwargs: Any) -> None:
        assert self._driver is not None
        self._driver.start(state.model, state.data.calib)

    def on_sequential_epoch_end(self, state: State, event: Event, modules: list[nn.Module], **kwargs: Any) -> None:
        assert self._driver is not None
        self._driver.end_step(state.model, modules)

    def on_calibration_end(self, state: State, event: Event, **kwargs: Any) -> None:
        assert self._driver is not None
        self._driver.finish()


def run_pass(
    state: State, pass_: Pass, room: Room, options: dict[str, Any], propagate_error: bool, calibration: Any = None
) -> None:
    """Run a pass in a session of its own, inside a modifier's: one more pass over its data.

    :param room: the pass'
    :param options: the caller's, of the host's pipeline
    :param propagate_error: whether a layer sees the outputs of the changed layers before it, or of the dense ones
    :param calibration: batches to run on; the modifier's where None
    """
    modifier = _NestedModifier()
    calibration = state.data.calib if calibration is None else calibration
    arguments = DatasetArguments(**options, propagate_error=propagate_error)
    with modifier.drive(pass_, room).abort_on_error(), create_session() as session:
        recipe = Recipe.from_modifiers([modifier])
        session.initialize(model=state.model, recipe=recipe, calib_data=calibration, copy_data=False)
        SequentialPipeline()(state.model, calibration, arguments)
        session.finalize()


@contextmanager
def enter_room(model: PreTrainedModel, placement: Placement, count_on_cpu: bool) -> Iterator[Room]:
    """Hold one decoder layer on the device, and count what is there, while the block lasts."""
    layers = list_attention_configs(model)
    with ExitStack() as stack:
        stack.enter_context(hold_one_layer(layers, can_fuse_attention(model), placement.release_weights))
        room = stack.enter_context(open_room(placement, count_on_cpu))
        if placement.embed_on_host:
            embeddings = [module for module in model.modules() if isinstance(module, nn.Embedding)]
            head = model.get_output_embeddings()
            assert head is not None
            caches = room.account.live.host_caches if room.account and room.account.live else set()
            stack.enter_context(keep_on_host(embeddings, head, room.to_device, caches))
        yield room
