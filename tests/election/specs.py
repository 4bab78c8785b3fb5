"""Models that exist only as sizes."""

from __future__ import annotations

from meshd.vocabulary import MB, Advert, Capability, LayerRange, Loading, ModelSpec, NodeId


def spec(
    layer_mb: tuple[float, ...] = (6.75,) * 30, *, embed_mb: float = 54.0, head_mb: float = 54.0, tied: bool = True
) -> ModelSpec:
    """SmolLM2-135M in bf16 unless told otherwise."""
    return ModelSpec(
        name="m",
        digest="d",
        dtype="bf16",
        num_layers=len(layer_mb),
        hidden_size=576,
        vocab_size=49152,
        layer_bytes=tuple(int(mb * MB) for mb in layer_mb),
        embed_bytes=int(embed_mb * MB),
        head_bytes=int(head_mb * MB),
        tied=tied,
        kv_bytes_per_token_layer=768,
        context=8192,
    )


def hash_spec(layers: int, layer_mb: int) -> ModelSpec:
    return spec((float(layer_mb),) * layers, embed_mb=0, head_mb=0, tied=False)


def node(number: int) -> NodeId:
    return NodeId(f"{number:032x}")


def advert(
    number: int,
    capacity_mb: float,
    layers: tuple[int, int] | None = None,
    *,
    layer_ms: float = 1.0,
    loading: tuple[int, int] | None = None,
    digest: str = "d",
) -> Advert:
    return Advert(
        node_id=node(number),
        name=f"n{number}",
        epoch=1,
        incarnation=1,
        addresses=(),
        model="m",
        digest=digest,
        num_layers=30,
        layers=LayerRange(*layers) if layers else None,
        loading=Loading(LayerRange(*loading), "loading", 0.1) if loading else None,
        capability=Capability(capacity_mb=capacity_mb, layer_ms_1=layer_ms),  # type: ignore[arg-type]  # lies arrive too
    )
