"""Adverts, statements and healths for tests: fixed ones, and strategies for arbitrary ones."""

from __future__ import annotations

import hashlib

from hypothesis import strategies as st

from meshd.gossip import advert_wire, statement
from meshd.gossip.membership import Belief, Rank
from meshd.gossip.statement import Statement
from meshd.vocabulary import Advert, Capability, Endpoint, Health, LayerRange, Loading, NodeId
from tests.sim.gossip_net import fake_sign, node_id

ME, OTHER, THIRD = node_id(0), node_id(1), node_id(2)

ADVERT = Advert(
    node_id=OTHER,
    name="n1",
    epoch=3,
    incarnation=2,
    addresses=(Endpoint("192.168.1.20", 8091), Endpoint("2001:db8::7", 8091)),
    http=Endpoint("192.168.1.20", 8090),
    version="0.1.0",
    wire=1,
    model="smollm2-135m",
    digest=hashlib.sha256(b"weights").hexdigest(),
    dtype="bf16",
    arith="5f2a91c0",
    num_layers=30,
    layers=LayerRange(0, 15),
    generation=4,
    loading=Loading(LayerRange(15, 30), "fetching", 0.25),
    capability=Capability("cpu", 2400, 1.25, 3.5, (hashlib.sha256(b"weights").hexdigest(),)),
    entry=True,
    draining=False,
)

HEALTH = Health(
    ram_free_mb=3200,
    ram_total_mb=7900,
    load1=1.25,
    in_flight=3,
    queue_depth=1,
    tokens_per_s=31.5,
    kv_used_mb=100,
    kv_total_mb=400,
    battery_pct=81,
    on_ac=True,
    temp_c=61.0,
    jammed=False,
)


def stated(advert: Advert, *, left: bool = False) -> tuple[Statement, bytes]:
    """A signed statement and the blob it names."""
    blob = advert_wire.encode(advert)
    made = statement.make(
        advert.node_id,
        advert.epoch,
        advert.incarnation,
        statement.short_hash(blob),
        left=left,
        sign=fake_sign(advert.node_id),
    )
    return made, blob


hosts = st.one_of(st.ip_addresses(v=4).map(str), st.ip_addresses(v=6).map(str), st.just("mini-3.lan"))
endpoints = st.builds(Endpoint, hosts, st.integers(0, 65535))
digests = st.one_of(st.binary(min_size=32, max_size=32).map(bytes.hex), st.just("hash-30-0"), st.just(""))
ranges = st.tuples(st.integers(0, 200), st.integers(1, 200)).map(lambda t: LayerRange(t[0], t[0] + t[1]))
names = st.from_regex(r"[A-Za-z0-9._-]{1,64}", fullmatch=True)

adverts = st.builds(
    Advert,
    node_id=st.just(OTHER),
    name=names,
    epoch=st.integers(0, 1 << 40),
    incarnation=st.integers(0, 1 << 40),
    addresses=st.lists(endpoints, max_size=30).map(tuple),
    http=st.none() | endpoints,
    version=st.text(max_size=20),
    wire=st.integers(1, 5),
    model=st.text(alphabet="abc/@._-0", max_size=200),
    digest=digests,
    dtype=st.sampled_from(["", "bf16", "int8"]),
    arith=st.text(alphabet="0123456789abcdef", max_size=16),
    num_layers=st.integers(0, 200),
    layers=st.none() | ranges,
    generation=st.integers(0, 1000),
    loading=st.none()
    | st.builds(Loading, ranges, st.sampled_from(["claimed", "fetching"]), st.integers(0, 100).map(lambda p: p / 100)),
    capability=st.builds(
        Capability,
        st.sampled_from(["cpu", "cuda", "mps"]),
        st.integers(0, 1 << 20),
        st.integers(0, 10**6).map(lambda us: us / 1000),
        st.integers(0, 10**6).map(lambda us: us / 1000),
        st.lists(digests, max_size=40).map(tuple),
    ),
    entry=st.booleans(),
    draining=st.booleans(),
)

healths = st.builds(
    Health,
    ram_free_mb=st.integers(0, 1 << 24),
    ram_total_mb=st.integers(0, 1 << 24),
    load1=st.integers(0, 100000).map(lambda n: n / 100),
    in_flight=st.integers(0, 10000),
    queue_depth=st.integers(0, 10000),
    tokens_per_s=st.integers(0, 100000).map(lambda n: n / 10),
    kv_used_mb=st.integers(0, 1 << 24),
    kv_total_mb=st.integers(0, 1 << 24),
    battery_pct=st.none() | st.integers(0, 100),
    on_ac=st.none() | st.booleans(),
    temp_c=st.none() | st.integers(-40, 120).map(float),
    jammed=st.booleans(),
)


@st.composite
def beliefs(draw: st.DrawFn) -> Belief:
    """Evidence of one member of few epochs and incarnations, so that they meet."""
    epoch, incarnation = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    rank = draw(st.sampled_from(Rank))
    if rank in (Rank.ALIVE, Rank.LEFT):
        said = statement.make(OTHER, epoch, incarnation, b"8 bytes!", left=rank is Rank.LEFT, sign=fake_sign(OTHER))
        return Belief(epoch, incarnation, rank, statement=said)
    return Belief(epoch, incarnation, rank, (draw(st.sampled_from([ME, THIRD, node_id(3)])),))


def node(i: int) -> NodeId:
    return node_id(i)
