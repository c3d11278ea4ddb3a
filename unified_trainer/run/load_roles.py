"""Loading the roles of a run: networks in memory, those of which several roles can share one, and roles over them."""

from collections.abc import Mapping

from unified_trainer.basics.types import of_kind
from unified_trainer.models.sparse_attention import DENSE
from unified_trainer.parallel.mesh import Mesh
from unified_trainer.roles.backbone import Backbone
from unified_trainer.roles.blocks import widest
from unified_trainer.roles.causal import Causal
from unified_trainer.roles.experts import Expert, ExpertPair
from unified_trainer.roles.recompute import Recompute
from unified_trainer.roles.role import Role, Trainable
from unified_trainer.roles.sparse_schedule import raise_share
from unified_trainer.run.plan.roles import RolePlan
from unified_trainer.run.registry import open_model


def load_roles(
    plans: Mapping[str, RolePlan], mesh: Mesh, *, half: bool = True, sampling: bool = False
) -> dict[str, Role]:
    """Load the roles; those whose base weights stay as they are share one network per folder component.

    With `half`, frozen base weights are held in the precision of their roles. Without it they are float32 and not
    shared, so that the caller may change them, as export does. With `sampling` the weights that training sends count as
    frozen: they only arrive.
    """
    # key: path, component, adapter that is merged into it, form (quantised, sparse, flow map, actions), and the owner
    # of a network that is not shared: one whose own weights are trained, such as the gates of its attention
    users: dict[tuple[str, str, str, tuple[object, ...], str], list[tuple[str, Expert]]] = {}
    for name, plan in plans.items():
        for expert, component in plan.layout.components.items():
            if expert in plan.layout.left_out:
                continue
            config = plan.config
            form = (config.quantized, config.sparse, config.is_flow_map, config.new_actions)
            own = plan.own_adapter is None or config.sparse != DENSE or config.is_flow_map or config.new_actions > 0
            alone = not half or (expert in plan.layout.trained and own)
            merged = plan.merged[expert].name if expert in plan.merged else ""
            owner = f"{name} {expert}" if alone else ""
            key = (plan.path, component, merged, form, owner)
            users.setdefault(key, []).append((name, expert))
    backbones: dict[tuple[str, Expert], Backbone] = {}
    for (path, component, *_), seats in users.items():
        backbones |= dict.fromkeys(
            seats, _load_backbone(path, component, seats, plans, mesh, half=half, sampling=sampling)
        )
    roles: dict[str, Role] = {}
    for name, plan in plans.items():
        high, low = (backbones.get((name, expert)) for expert in ("high", "low"))
        at = plan.layout.boundary
        roles[name] = plan.kind(name, backbones[name, ""] if at is None else ExpertPair(high, low, at), plan.config)
        if plan.config.sparse.warmup_updates:
            raise_share(of_kind(Trainable, roles[name]))
    return roles


def _load_backbone(
    path: str,
    component: str,
    seats: list[tuple[str, Expert]],
    plans: Mapping[str, RolePlan],
    mesh: Mesh,
    *,
    half: bool,
    sampling: bool,
) -> Backbone:
    """Load one network, for all roles and experts of `seats`."""
    names = [name for name, _ in seats]
    training = [(name, expert) for name, expert in seats if expert in plans[name].layout.trained]
    adapters = {Role.key(*seat): own for seat in training if (own := plans[seat[0]].own_adapter) is not None}
    owned = bool(training) and not adapters
    causal = any(issubclass(plans[name].kind, Causal) for name in names)
    config = plans[names[0]].config
    model = open_model(names[0], path, component, causal=causal, config=config)
    kind, form = config.quantized
    if form:
        from unified_trainer.models.quantize import wrap

        mesh = wrap(model, kind, form, mesh)
    recompute = [plans[name].recomputed(len(model.blocks)) for name in names]
    half_passes = half and all(plans[name].config.precision == "bf16" for name in names)
    return Backbone(
        model,
        mesh,
        trained=owned and issubclass(plans[names[0]].kind, Trainable),
        adapters=adapters,
        recompute=Recompute.least_memory(recompute),
        half=half_passes and (sampling or not owned),
        half_passes=half_passes,
        compile=widest(plans[name].config.compile for name in names),
        offload=half and any(expert in plans[name].layout.offloaded for name, expert in seats),
        merged=plans[names[0]].merged.get(seats[0][1]),
        starts={Role.key(name, one): plans[name].starts[one] for name, one in seats if one in plans[name].starts},
    )
