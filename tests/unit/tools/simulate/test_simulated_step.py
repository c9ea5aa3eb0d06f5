"""One step as events: closed forms of networks, of what backward hides, and of what it does not."""

import math
import random
from dataclasses import replace

import pytest

from benchmarks.twin.fusion import CycledJob, InGroups, in_cycles
from bigbatch.comm.gradients.fusion import PlanSizes
from bigbatch.errors import SimulationError
from bigbatch.tools.measure.cost_model import Backward, ClusterModel, LinkModel, hierarchical_seconds, ring_seconds
from bigbatch.tools.simulate.constants import BACKWARD_SHARE, Constants
from bigbatch.tools.simulate.interval import Uncertainty, interval_of
from bigbatch.tools.simulate.network import Network
from bigbatch.tools.simulate.plan_search import search_plan
from bigbatch.tools.simulate.shapes import ModelShape, load_shape, shape_names
from bigbatch.tools.simulate.step import (
    Compute,
    SimulatedJob,
    backward_of,
    fit_compute,
    lateness,
)

IDEAL = Constants(
    inside_latency_seconds=0.0,
    across_latency_seconds=0.0,
    straggler_share=0.0,
    input_share=0.0,
)
PAIR = Network(2, 1, 1e12, 1e9, constants=IDEAL)
"""Two nodes of one device, 1 GB/s between them and no latency: an all-reduce of M bytes takes M / 1e9 seconds."""
FOUR = ModelShape("four", (100, 200, 300, 400), (0.25, 0.5, 0.75, 1.0), 1.0)


def test_networks_have_the_closed_forms_of_their_hops():
    constants = Constants(inside_latency_seconds=1e-6, across_latency_seconds=1e-5)
    network = Network(4, 2, 1e11, 1e9, constants=constants)
    # 2 * 3/4 of 1 GB over 1 GB/s; the tree: 2 hops inside, 2 * log2(4) = 4 across; the ring: 8 inside, 8 across
    assert network.seconds(1e9) == pytest.approx(1.5 + 2e-6 + 4e-5)
    # a ring crosses nodes with 2 * 7/8 of 1 GB, as each of its links carries
    assert replace(network, has_trees=False).seconds(1e9) == pytest.approx(1.75 + 8e-6 + 8e-5)
    # the ring of sockets has one connection between two nodes: 0.8 of 10 Gbit/s at most
    for rate, seconds in ((0.5e9, 3.5), (1e9, 1.75), (12.5e9, 1.75)):
        sockets = replace(network, carrier="sockets", across_bytes_per_second=rate)
        assert sockets.seconds(1e9) == pytest.approx(seconds + 8e-6 + 8e-5)
        assert replace(sockets, num_nodes=1).seconds(1e9) == replace(network, num_nodes=1).seconds(1e9)
    # 16 connections carry more than the link
    sixteen = replace(constants, connections_gbit_per_s=160)
    assert replace(sockets, constants=sixteen).seconds(1e9) == pytest.approx(0.14 + 8e-6 + 8e-5)
    # inside one node: 2 * 7/8 of 1 GB at 100 GB/s, and 14 hops; of 1 MB at a quarter of the rate, and 0.27 of the hops
    inside = Network(1, 8, 1e11, 1e9, constants=replace(constants, inside_latency_seconds=1e-5))
    assert inside.seconds(1e9) == pytest.approx(0.0175 + 14e-5)
    assert inside.seconds(1e6) == pytest.approx(4 * 17.5e-6 + 0.27 * 14e-5)
    assert Network(1, 1, 1e11, 1e9).seconds(1e9) == 0
    host = replace(network, carrier="host", constants=replace(constants, host_bytes_per_second=2e9))
    assert host.seconds(1e9) == pytest.approx(2 * 7 / 8 / 2)
    # of 4 nodes 3 send each server its half of 1 GB
    assert replace(network, carrier="servers", num_servers=2).seconds(1e9) == pytest.approx(1.5)
    assert replace(network, carrier="servers").seconds(1e9) == pytest.approx(0.75)


def test_algorithms_by_name_are_those_of_the_cost_model():
    network = Network(4, 2, 1e10, 1e9)
    links = network.constants.inside_latency_seconds, network.constants.across_latency_seconds
    model = ClusterModel((2,) * 4, LinkModel(links[0], 1e10), LinkModel(links[1], 1e9))
    assert network.seconds(5e7, "ring") == ring_seconds(5e7, model)
    assert network.seconds(5e7, "hierarchical") == hierarchical_seconds(5e7, model)


def test_one_group_of_all_gradients_hides_nothing():
    step = SimulatedJob(FOUR, PAIR, InGroups(1)).simulate(Compute(0.01, 0.5), 10)
    assert step.computing == pytest.approx(0.6)
    assert step.communication == pytest.approx(4000 / 1e9)
    assert step.stragglers == 0
    assert step.seconds == pytest.approx(0.6 + 4000 / 1e9)


@pytest.mark.parametrize(
    "job",
    [
        SimulatedJob(FOUR, PAIR, PlanSizes(1, 1)),
        SimulatedJob(FOUR, PAIR, InGroups(4)),
        CycledJob(FOUR, PAIR, cycle_seconds=0.0),
    ],
)
def test_what_backward_hides_is_what_is_ready_early(job):
    step = job.simulate(Compute(0.1, 0.0), 10)
    assert [each.num_bytes for each in step.transfers] == [400, 800, 1200, 1600]
    # three are through before the last is ready, which nothing can hide
    assert step.communication == pytest.approx(1600 / 1e9)
    assert [each.ready_seconds for each in step.transfers] == pytest.approx(
        [share * BACKWARD_SHARE for share in FOUR.ready_shares]
    )


@pytest.mark.parametrize("fusion", [PlanSizes(1, 1), InGroups(4)])
def test_sums_over_sockets_wait_for_the_end_of_backward(fusion):
    sockets = replace(PAIR, carrier="sockets")
    step = SimulatedJob(FOUR, sockets, fusion).simulate(Compute(0.1, 0.0), 10)
    assert step.communication == pytest.approx(4000 / 1e9)
    assert step.hidden == 0
    # inside a node nothing travels over them
    inside = replace(sockets, num_nodes=1, devices_per_node=2, inside_bytes_per_second=1e9)
    assert SimulatedJob(FOUR, inside, fusion).simulate(Compute(0.1, 0.0), 10).communication < 4000 / 1e9


def test_slow_network_is_waited_for_whole():
    slow = replace(PAIR, across_bytes_per_second=1.0)
    step = SimulatedJob(FOUR, slow, InGroups(4)).simulate(Compute(0.1, 0.0), 10)
    # from the first gradient's readiness on the wire is never idle
    assert step.communication == pytest.approx(4000 - 0.75 * BACKWARD_SHARE)


def test_microbatches_compute_each_for_itself_and_send_once():
    job = SimulatedJob(FOUR, PAIR, InGroups(1))
    one, many = job.simulate(Compute(0.01, 0.5), 10), job.simulate(Compute(0.01, 0.5), 40, num_microbatches=4)
    assert many.computing == pytest.approx(4 * one.computing)
    assert many.communication == pytest.approx(one.communication)


def test_each_doubling_of_nodes_costs_what_the_constants_say():
    constants = replace(IDEAL, straggler_share=0.01, input_share=0.05)
    job = SimulatedJob(FOUR, replace(PAIR, num_nodes=8, constants=constants), InGroups(4))
    step = job.simulate(Compute(1e6, 0.0), 1)
    assert step.stragglers == pytest.approx((3 * 0.01 + 0.05) * 1e6)


def test_cycles_send_what_is_ready_and_never_more_than_a_buffer():
    tensors = FOUR.tensors(4)
    ready = {tensor.name: 0.0 for tensor in tensors}
    sent = in_cycles(tensors, Backward(ready, 1.0), lambda num_bytes: num_bytes / 1e3, buffer_bytes=1500)
    assert [(each.num_bytes, each.start_seconds, each.end_seconds) for each in sent] == [
        (1200, 0.0, 1.2),
        (1200, 1.2, 2.4),
        (1600, 2.4, 4.0),
    ]


def test_shapes_are_those_of_the_published_models():
    assert {name: load_shape(name).num_parameters for name in ("resnet50", "vgg16", "mobilenet_v2")} == {
        "resnet50": 25_557_032,
        "vgg16": 138_357_544,
        "mobilenet_v2": 3_504_872,
    }
    for name in shape_names():
        shape = load_shape(name)
        assert list(shape.ready_shares) == sorted(shape.ready_shares)
        # only the first layer's parameters are ready last
        assert math.isclose(shape.ready_shares[-1], 1.0)
    with pytest.raises(SimulationError, match="resnet50"):
        load_shape("resnet5")


@pytest.mark.long
def test_stored_layers_are_what_the_models_have():
    from benchmarks.twin.layers import all_layers
    from bigbatch.tools.simulate.shapes import _stored

    assert {name: [(o, list(c)) for o, c in layers] for name, layers in _stored().items()} == all_layers()


def test_plan_search_of_comm_tune_sees_what_the_step_exposes():
    """One search of some thousand plans; what it says its plan leaves exposed is what a simulated step waits for."""
    shape = load_shape("resnet50")
    ideal = replace(PAIR, constants=replace(IDEAL, across_latency_seconds=1e-4))
    tensors, backward = shape.tensors(4), backward_of(shape, BACKWARD_SHARE * 0.15)
    found = search_plan(tensors, backward, ideal.seconds)
    assert found.exposed_seconds > 0
    step = SimulatedJob(shape, ideal, found.sizes).simulate(Compute(0.15, 0.0), 1)
    assert step.communication == pytest.approx(found.exposed_seconds)


def test_latest_of_exponential_delays_is_drawn_as_its_quantile_says():
    """Checked by sampling 64 nodes with an exponential delay each, and one."""
    draw = random.Random(0)
    for num_nodes in (1, 64):
        latest = sorted(max(draw.expovariate(1.0) for _ in range(num_nodes)) for _ in range(10_000))
        found = latest[9_000] - sum(latest) / len(latest)
        assert lateness(num_nodes) == pytest.approx(found, abs=0.08)
    # a million nodes: the distribution of extremes, -log(-log 0.9) less Euler's constant
    assert lateness(1_000_000) == pytest.approx(2.2504 - 0.5772, abs=0.01)


def test_one_step_in_ten_is_slower_than_its_mean_by_the_latest_node():
    constants = replace(IDEAL, straggler_share=0.01)
    job = SimulatedJob(FOUR, Network(64, 1, 1e12, 1e9, constants=constants), InGroups(1))
    step = job.simulate(Compute(1.0, 0.0), 1)
    assert step.slow_seconds - step.seconds == pytest.approx(0.01 / math.log(2) * lateness(64))


def test_compute_is_found_with_which_a_step_takes_its_time():
    step = CycledJob(load_shape("resnet50"), PAIR)
    found = fit_compute(step, 0.01, 64, 0.4)
    assert step.simulate(found, 64).seconds == pytest.approx(0.4, rel=2e-4)
    # even without images its sums take longer
    assert fit_compute(step, 0.0, 64, 1e-4).seconds_per_image == 0.0


def interval(job: SimulatedJob, uncertainty: Uncertainty) -> tuple[float, float]:
    compute = Compute(0.01, 0.0)
    step = job.simulate(compute, 10)
    found = interval_of(job, compute, step, 10, uncertainty)
    return math.log(step.seconds / found.low), math.log(found.high / step.seconds)


def test_interval_is_each_cause_s_spread_in_squares_times_its_factor(monkeypatch):
    monkeypatch.setattr("bigbatch.tools.simulate.interval.FACTORS", {"same_system": 2.0})
    alone = SimulatedJob(FOUR, replace(PAIR, num_nodes=1), InGroups(1))
    assert interval(alone, Uncertainty(0.03)) == pytest.approx((0.06, 0.06))
    monkeypatch.setattr("bigbatch.tools.simulate.interval.UNCHECKED_REACH", (0.1, 0.5))
    assert interval(alone, Uncertainty(0.03, is_unchecked=True)) == pytest.approx((0.1, 0.5))
    assert interval(alone, Uncertainty(0.4, is_unchecked=True)) == pytest.approx((0.8, 0.8))
    for carrier, num_nodes, is_widened in (("host", 2, 1), ("servers", 2, 1), ("sockets", 2, 1), ("nccl", 2, 0)):
        job = SimulatedJob(FOUR, replace(PAIR, num_nodes=num_nodes, carrier=carrier), InGroups(1))
        assert (interval(job, Uncertainty(0.0))[1] >= 0.499) == is_widened, carrier
    inside = replace(PAIR, num_nodes=1, devices_per_node=2)
    for carrier, is_widened in (("host", 1), ("servers", 1), ("sockets", 0), ("nccl", 0)):
        assert replace(inside, carrier=carrier).has_few_measurements == is_widened, carrier
    # 0.1 s of images and 0.1 s of sums in one group, which the unknown link makes 3 times as long, or a third of it
    slow = SimulatedJob(FOUR, replace(PAIR, across_bytes_per_second=4e4), InGroups(1))
    assert interval(slow, Uncertainty(0.0, has_unknown_link=True)) == pytest.approx(
        (2 * math.log(0.2 / (0.1 + 0.1 / 3)), 2 * math.log(0.4 / 0.2))
    )
    # hidden sums may wait for backward's end, if nothing is known of the link
    hidden = SimulatedJob(FOUR, replace(PAIR, across_bytes_per_second=1e5), InGroups(4))
    step = hidden.simulate(Compute(0.01, 0.0), 10)
    assert step.hidden == pytest.approx(0.04 - step.communication)
    assert interval(hidden, Uncertainty(0.0, has_unknown_link=True))[1] >= 2 * math.log(0.14 / step.seconds) * 0.999
