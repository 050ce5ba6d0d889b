"""Every invariant of the core, one function each. ``check`` proves them all after any call.

The check walks every node, slot and operation. So only tests, simulated worlds and ``--audit`` make it, and it is never
on a hot path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from asynccache.core.cache import CacheCore
from asynccache.core.ledger import DEVICE, HOST, Kind
from asynccache.core.plan import SLOT_BYTES
from asynccache.core.tree import ABSENT, ARRIVING, LEAVING, NAMES, PRESENT, Node
from asynccache.errors import InvariantViolation

_FILLS = {Kind.BACKUP_HOST: HOST, Kind.LOAD_BACK: DEVICE}


def check(core: CacheCore, idle: bool = False) -> None:
    """Check all laws, and raise ``InvariantViolation`` for the first that is broken, with a message that names what
    breaks it. ``idle``: also require that there is no hold, no lease and no operation in flight."""
    for law in LAWS:
        law(core)
    if idle:
        _idle(core)


def _require(holds: bool, *what: object) -> None:
    if not holds:
        raise InvariantViolation(" ".join(map(str, what)))


def _nodes(core: CacheCore) -> Iterator[Node]:
    stack: list[Node] = [*core.world.roots.values(), *core.world.dead_roots]
    while stack:
        node = stack.pop()
        if node.parent is not None:
            yield node
        stack.extend((node.children or {}).values())


def _kids(core: CacheCore) -> dict[int, list[Node]]:
    """Return the nodes by the ``id`` of their parent, also those that were cut off and are not among its children."""
    kids: dict[int, list[Node]] = {}
    for node in _nodes(core):
        kids.setdefault(id(node.parent), []).append(node)
    return kids


def _slot_list(slots: bytes) -> list[int]:
    return list(memoryview(slots).cast("i"))


def _every_slot_is_in_one_place(core: CacheCore) -> None:
    world = core.world
    for place, shelf in enumerate(world.shelves):
        found = Counter(shelf.slots.free())
        for node in _nodes(core):
            found.update(_slot_list(node.slots[place]))
        if place < world.count:
            for lease in core.active_leases():
                kept = lease.own[place] if world.components[place].divides else lease.states
                found.update(_slot_list(kept))
            for op in world.ledger.ops.values():
                if op.slots:
                    found.update(_slot_list(op.slots[place]))
        else:
            for fetch in core.active_fetches():
                found.update(_slot_list(fetch.held.get(place - world.count, b"")))
        wrong = [slot for slot in range(shelf.slots.capacity) if found[slot] != 1]
        whole = not wrong and len(found) == shelf.slots.capacity
        _require(whole, "place", place, "has slots that nobody owns, or several do:", wrong)


def _parent_and_child_agree(core: CacheCore) -> None:
    world, count = core.world, 0
    for node in _nodes(core):
        count += 1
        parent = node.parent
        assert parent is not None
        page = world.page_bytes
        cut_off = node.root is not parent.root and node.root.dead and node.root.origin is parent.root.origin
        above = node.root if cut_off else parent
        _require(bool(node.key) and len(node.key) % page == 0, node, "has no whole pages")
        _require(node.end == parent.end + len(node.key) // page, node, "does not end where its key does")
        _require((above.children or {}).get(node.key[:page]) is node, node, "is not its parent's child")
        _require(node.root is parent.root or cut_off, node, "has another root than its parent")
        _require(len(node.hashes) in (0, 32 * (len(node.key) // page)), node, "has not one hash for each of its pages")
    _require(count == world.counters.nodes, "nodes counted", world.counters.nodes, "found", count)


def _slots_fit_states(core: CacheCore) -> None:
    world = core.world
    for node in _nodes(core):
        for place, slots in enumerate(node.slots):
            wanted = 0 if node.state[place] == ABSENT else world.pages(node, place % world.count) * SLOT_BYTES
            _require(len(slots) == wanted, node, "place", place, "has slots that do not fit its state")


def _data_is_closed_towards_the_root(core: CacheCore) -> None:
    for node in _nodes(core):
        for base in (0, core.world.count):
            state = node.state[base]
            above = node.parent
            if above is None or above.parent is None:
                continue
            higher = above.state[base]
            _require(state != PRESENT or higher == PRESENT, node, "is PRESENT below", NAMES[higher])
            _require(state != ARRIVING or higher in (ARRIVING, PRESENT), node, "is ARRIVING below", NAMES[higher])


def _no_auxiliary_data_without_full(core: CacheCore) -> None:
    count = core.world.count
    for node in _nodes(core):
        for base in (0, count):
            full = node.state[base]
            for state in node.state[base + 1 : base + count]:
                _require(state != PRESENT or full == PRESENT, node, "has auxiliary data, FULL is", NAMES[full])
                _require(state != ARRIVING or full in (ARRIVING, PRESENT), node, "auxiliary arrives without FULL")


def _no_node_is_empty(core: CacheCore) -> None:
    count = core.world.count
    for node in _nodes(core):
        _require(node.state[0] != ABSENT or node.state[count] != ABSENT, node, "has FULL on no tier")


def _sums_are_exact(core: CacheCore) -> None:
    world, count = core.world, core.world.count
    evictable, clean, condemned = [0] * (2 * count), 0, 0
    all_kids = _kids(core)
    for node in _nodes(core):
        kids = all_kids.get(id(node), [])
        _require(node.kids_device == sum(k.state[0] != ABSENT for k in kids), node, "kids_device is wrong")
        _require(node.kids_host == sum(k.state[count] != ABSENT for k in kids), node, "kids_host is wrong")
        for place, slots in enumerate(node.slots):
            if node.state[place] == PRESENT and not node.pins[place]:
                evictable[place] += len(slots) // SLOT_BYTES
        if node.state[0] == PRESENT and node.state[count] == PRESENT:
            clean += world.pages(node, 0)
        if node.condemned & 1:
            condemned += world.pages(node, 0)
            _require(node.state[0] == PRESENT and not node.kids_device, node, "is condemned, and no leaf of the device")
        for c in world.bits[node.condemned]:
            _require(node.state[c] == PRESENT, node, "component", c, "is condemned, and not on the device")
    counted = [shelf.evictable for shelf in world.shelves]
    _require(counted == evictable, "evictable pages", counted, "found", evictable)
    _require(world.clean_pages == clean, "clean pages", world.clean_pages, "found", clean)
    _require(world.condemned_pages == condemned, "condemned pages", world.condemned_pages, "found", condemned)


def _pins_are_exact(core: CacheCore) -> None:
    world, count = core.world, core.world.count
    pins: Counter[tuple[int, int]] = Counter()
    for hold in core.active_holds():
        base = hold.tier * count
        pins[id(hold.end), base] += 1
        for component in world.auxiliary:
            node, low = hold.end, hold.lows[component.index]
            while node.parent is not None and node.end > low:
                pins[id(node), base + component.index] += 1
                if not component.divides:
                    break
                node = node.parent
    for op in world.ledger.ops.values():
        for node, _, top in op.fragments:
            for tier in op.tiers:
                for c in range(top + 1):
                    pins[id(node), tier * count + c] += 1
    kids = _kids(core)
    for node in _nodes(core):
        for place, count_of in enumerate(node.pins):
            expected = pins[id(node), place]
            if place % count == 0:
                expected += sum(child.pins[place] > 0 for child in kids.get(id(node), ()))
            _require(count_of == expected, node, "place", place, "has", count_of, "pins, found", expected)
            closed = not count_of or place % count == 0 or node.pins[place - 1] > 0
            _require(closed, node, "place", place, "is pinned, the component before it is not")


def _orders_hold_what_they_should(core: CacheCore) -> None:
    world = core.world
    waiting: dict[tuple[int, int], int] = {}
    for place, shelf in enumerate(world.shelves):
        for late, order in enumerate(shelf.orders):
            for _, node in order.entries():
                _require((id(node), place) not in waiting, node, "place", place, "waits twice")
                waiting[id(node), place] = late
    for node in _nodes(core):
        for place, part in enumerate(node.entry):
            found = waiting.get((id(node), place))
            agree = (part is None) == (found is None)
            _require(agree, node, "place", place, "has an entry and waits in no order, or the reverse")
            if part is None:
                _require(not world.is_candidate(node, place), node, "place", place, "is evictable, waits in no order")
                continue
            _require(node.state[place] == PRESENT, node, "place", place, "waits in an order and is not there")
            _require(found == world.eviction_order(node, place), node, "place", place, "waits in the wrong order")
            queue = part.queue
            _require(part in queue.chunks, node, "place", place, "waits in a chunk that was taken apart")
            _require(part.nodes.count(node) == 1, node, "place", place, "waits in another chunk than it says")
            stamp, waits_by = node.stamp[place % world.count], part.stamps[part.nodes.index(node)]
            _require(waits_by <= stamp, node, "place", place, "waits by a later stamp than its own")
            if waits_by == stamp:
                wanted = world.queue(node, place, world.eviction_order(node, place))
                _require(queue is wanted, node, "place", place, "waits in another queue than the policy says")
    for place, shelf in enumerate(world.shelves):
        for order in shelf.orders:
            for queue in (order.first, *order.rest):
                stamps = [stamp for part in queue.chunks for stamp in part.stamps]
                _require(stamps == sorted(stamps), "place", place, "a queue is out of order", stamps)
                _require(all(part.nodes for part in queue.chunks), "place", place, "a queue has an empty chunk")


def _operations_cover_live_nodes(core: CacheCore) -> None:
    world = core.world
    live = {id(node): node for node in _nodes(core)}
    covering: Counter[tuple[int, int]] = Counter()
    for op in world.ledger.ops.values():
        for node, moves, top in op.fragments:
            _require(id(node) in live, op, "covers a node that left the tree")
            _require(sum(other is op for other in node.ops) == 1, op, "is not among its node's operations")
            _require(moves.bit_length() - 1 <= top, op, "moves what it does not pin")
            tier = _FILLS.get(op.kind)
            for c in range(world.count):
                if tier is not None and moves >> c & 1:
                    covering[id(node), tier * world.count + c] += 1
                    expected = LEAVING if op.doomed else ARRIVING
                    _require(node.state[tier * world.count + c] == expected, op, "fills a cell in another state:", node)
            if op.kind is Kind.COMPUTE:
                _require(node.root.dead or not op.doomed, op, "has failed, and its pages can be found:", node)
    for node in live.values():
        _require(all(op.id in world.ledger.ops for op in node.ops), node, "is covered by an operation that ended")
        for place, state in enumerate(node.state):
            wanted = int(state in (ARRIVING, LEAVING))
            fillers = covering[id(node), place]
            _require(fillers == wanted, node, "place", place, "is filled by", fillers, "operations")


def _idle(core: CacheCore) -> None:
    _require(not core.active_leases(), "leases are left", core.active_leases())
    _require(not core.active_claims(), "claims are left", core.active_claims())
    _require(not core.world.ledger.ops, "operations are left", list(core.world.ledger.ops.values()))
    for node in _nodes(core):
        _require(not any(node.pins), node, "is pinned, and nobody is left who could have done it")
    _require(not core.world.dead_roots, "an invalidated namespace is left")
    empty = [root for root in core.world.roots.values() if root.children is None]
    _require(not empty, "namespaces are left with nothing below them", len(empty))
    _require(not any(root.holders for root in core.world.roots.values()), "a namespace counts holders, and has none")


def _nothing_is_stored_in_an_era_to_come(core: CacheCore) -> None:
    world = core.world
    for node in _nodes(core):
        _require(node.stored >> 3 <= world.era, node, "is stored in an era to come", node.stored)
        stored = world.stored(node)
        _require(stored < 1 << world.count, node, "is stored with components that are not configured", stored)
        _require(not stored or bool(node.hashes), node, "is stored, and has no hashes")


LAWS: tuple[Callable[[CacheCore], None], ...] = (
    _every_slot_is_in_one_place,
    _parent_and_child_agree,
    _slots_fit_states,
    _data_is_closed_towards_the_root,
    _no_auxiliary_data_without_full,
    _no_node_is_empty,
    _sums_are_exact,
    _pins_are_exact,
    _orders_hold_what_they_should,
    _operations_cover_live_nodes,
    _nothing_is_stored_in_an_era_to_come,
)
