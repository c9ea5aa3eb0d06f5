"""Network hardware, as made-up files of /sys state it."""

from pathlib import Path

from host_tree import add_card, add_port, write

from bigbatch.trainer.machine.network import Card, Port, read_cards, read_errors, read_ports, usual_rate


def test_cards_are_hardware_that_is_up_the_fastest_first(tmp_path: Path) -> None:
    add_card(tmp_path, "eth0", 1000)
    add_card(tmp_path, "eth1", 100000, mtu=9000)
    add_card(tmp_path, "eth2", 200000, state="down")
    add_card(tmp_path, "eth3", -1)  # a virtual machine's, which does not tell
    add_card(tmp_path, "veth0", 10000, below=" ")  # a container's, which states 10 Gbit/s whatever carries it
    assert read_cards(tmp_path) == [Card("eth1", 100.0, 9000), Card("eth0", 1.0, 1500)]


def test_bond_has_the_rate_of_a_member_in_place_of_it(tmp_path: Path) -> None:
    for name in ("eth0", "eth1"):
        add_card(tmp_path, name, 25000)
    add_card(tmp_path, "bond0", 50000, below="eth0")
    (tmp_path / "sys/class/net/bond0/lower_eth1").mkdir()
    (tmp_path / "sys/class/net/eth1/master").mkdir()
    assert read_cards(tmp_path) == [Card("bond0", 25.0, 1500)]


def test_interfaces_that_lie_upon_each_other_have_no_rate(tmp_path: Path) -> None:
    add_card(tmp_path, "a", 1000, below=" ")
    add_card(tmp_path, "b", 1000, below=" ")
    (tmp_path / "sys/class/net/a/lower_b").mkdir()
    (tmp_path / "sys/class/net/b/lower_a").mkdir()
    assert read_cards(tmp_path) == []


def test_ports_of_three_kinds(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0/1")
    add_port(tmp_path, "mlx5_1/1", state="1: DOWN", physical="3: Disabled", rate="10 Gb/sec (4X SDR)")
    routable = (
        ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "IB/RoCE v1"),
        ("0000:0000:0000:0000:0000:ffff:0a00:0001", "RoCE v2"),
    )
    add_port(tmp_path, "mlx5_2/1", rate="100 Gb/sec (4X EDR)", layer="Ethernet", gids=routable)
    local = ("fe80:0000:0000:0000:0000:00ff:fe00:0001", "RoCE v2")  # the kernel's own, without any IP address
    empty = (("0000:0000:0000:0000:0000:0000:0000:0000", "RoCE v2"), routable[0], local)
    add_port(tmp_path, "mlx5_3/1", rate="2.5 Gb/sec (1X SDR)", layer="Ethernet", gids=empty)
    ports = read_ports(tmp_path)
    assert ports == [
        Port("mlx5_0/1", "ACTIVE", "LinkUp", 400.0, "InfiniBand", has_routable_gid=False),
        Port("mlx5_1/1", "DOWN", "Disabled", 10.0, "InfiniBand", has_routable_gid=False),
        Port("mlx5_2/1", "ACTIVE", "LinkUp", 100.0, "Ethernet", has_routable_gid=True),
        Port("mlx5_3/1", "ACTIVE", "LinkUp", 2.5, "Ethernet", has_routable_gid=False),
    ]
    assert [port.is_usable for port in ports] == [True, False, True, True]
    assert usual_rate([ports[0], ports[2], ports[2]]) == 100.0
    assert usual_rate([ports[0], ports[2]]) == 100.0, "of two equally frequent ones the lower"


def test_errors_are_those_that_a_port_counts(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0/1", errors=7)
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/port_xmit_data", 123456)
    write(tmp_path, "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed", "N/A (no PMA)")
    assert read_errors(tmp_path) == {"mlx5_0/1 symbol_error": 7.0, "mlx5_0/1 port_rcv_errors": 7.0}


def test_host_without_network_hardware(tmp_path: Path) -> None:
    assert (read_cards(tmp_path), read_ports(tmp_path), read_errors(tmp_path)) == ([], [], {})
