"""MH-pFLGB: each site trains whatever network it likes beside a small one, the bypass, which alone is shared.

The features of the two bodies are fused channel by channel, I_fl; the site's own head answers on them, and the bypass's
head on what R' makes of them. A round has two stages: first the site's own network and the fusion learn, then the
bypass, with the other part held still, but not cut off: each stage's loss has both heads in it.

    local   own L(H_l(I_fl), y) + other L(H_g(R' I_fl), y)
    global  own L(H_g(R' I_fl), y) + other L(H_l(I_fl), y)

Xie, Lin, Xu, Luan, Zeng, Qian, Li, et al., MICCAI 2024, equations 1 and 2. https://arxiv.org/abs/2407.00474. No code
was published, and the learning rates are not in the paper; the defaults are those of the same group's MH-pFLID.
"""

from functools import partial

import torch
from torch import Tensor, nn

from fl_algorithms.engine.algorithm import Algorithm, Builder, Context, Share, loss_of, study_network
from fl_algorithms.engine.training import Batch, Networks, Phase
from fl_algorithms.methods.mhpflgb import MhPflgbSettings
from fl_algorithms.models.bypass import Bypass, Fusion, Shape, judged
from fl_algorithms.rows import MASKS
from fl_algorithms.study import SiteStudy
from fl_algorithms.tasks.base import Task
from wardround.errors import BadData
from wardround.tensors.manifests import MODEL

BYPASS, FUSION = "bypass", "fusion"


def mhpflgb(settings: MhPflgbSettings) -> Algorithm:
    """Slots: the site's own "model" and "fusion", and the shared "bypass"."""
    first, then = settings.train_local, settings.train_global

    def phases(context: Context) -> tuple[Phase, ...]:
        return (
            Phase(
                "local", (f"{MODEL}/*", f"{FUSION}/*"), first.steps, first.epochs, "local",
                settings.local_learning_rate, partial(stage_loss, settings, local=True),
            ),
            Phase(
                "global", (f"{BYPASS}/*",), then.steps, then.epochs, "global",
                settings.global_learning_rate, partial(stage_loss, settings, local=False),
            ),
        )  # fmt: skip

    slots: dict[str, Builder] = {
        MODEL: study_network,
        BYPASS: partial(bypass, settings),
        FUSION: partial(fusion, settings),
    }
    return Algorithm(slots=slots, shares=(Share(BYPASS),), phases=phases, infer=own_head)


def bypass(settings: MhPflgbSettings, study: SiteStudy, task: Task) -> Bypass:
    """The same at every site, whatever its own network is."""
    masks = study.task.row.gives == MASKS
    body, head = settings.global_body, settings.global_head
    return Bypass(task.input_shape, task.outputs, settings.widths, masks=masks, body=body, head=head)


def fusion(settings: MhPflgbSettings, study: SiteStudy, task: Task) -> Fusion:
    """Of the shapes that the two bodies give.

    Raises:
        BadData: those of the site's own body are not of the bypass's kind.
    """
    with torch.random.fork_rng(devices=[]):  # built for their shapes alone; torch's "meta" device takes 2 s to import
        local = features_shape(study_network(study, task).eval(), task.input_shape)
        whole = bypass(MhPflgbSettings(widths=settings.widths), study, task)
        beside = features_shape(whole.eval(), task.input_shape)
    if len(local) != len(beside):
        wanted = "one vector for each sample" if len(beside) == 1 else "one map for each channel"
        raise BadData(
            f"algorithm `{study.method.name}` fuses features that are {wanted}; the body of model "
            f"`{study.model.name}` gives {list(local)}",
            hint="another network in [model]; `fl-lab methods mhpflgb` says more",
        )
    down = settings.global_head
    return Fusion(local, beside, up=settings.global_body, down=down, weighed=settings.feature_fusion)


def features_shape(network: nn.Module, shape: Shape) -> Shape:
    """What the network's body makes of one sample of ``shape``."""
    with torch.no_grad():
        return tuple(network.get_submodule("body")(torch.zeros(1, *shape)).shape[1:])


def fused(networks: Networks, x: Tensor) -> Tensor:
    """I_fl."""
    bypass = networks[BYPASS]
    assert isinstance(bypass, Bypass)
    features = networks[MODEL].get_submodule("body")(x)
    joined: Tensor = networks[FUSION](features, None if bypass.body is None else bypass.body(x))
    return joined


def own_head(networks: Networks, x: Tensor) -> Tensor:
    """h9: the site's own head on the fused features; the bypass's head is not asked."""
    logits: Tensor = networks[MODEL].get_submodule("head")(fused(networks, x))
    return logits


def stage_loss(settings: MhPflgbSettings, context: Context, batch: Batch, *, local: bool) -> Tensor:
    """h4: both heads' losses, the stage's own head weighed by ``own``."""
    networks = context.networks
    features = fused(networks, batch.x)
    of_local, of_global = (settings.own, settings.other) if local else (settings.other, settings.own)
    loss = of_local * loss_of(context, networks[MODEL].get_submodule("head")(features), batch)
    if settings.global_head:
        lowered = networks[FUSION].get_submodule("down")(features)
        logits = judged(networks[BYPASS].get_submodule("head"), lowered, tuple(batch.x.shape[1:]))
        loss = loss + of_global * loss_of(context, logits, batch)
    return loss
